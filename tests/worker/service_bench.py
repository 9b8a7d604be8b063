"""Whole workers in the test's own process, with a stand-in for the engine and a small real tokenizer."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gllm.protocol import TERMINAL_ENTRY_ID, Done, Error, ReplyEvent, Resume, Start, Tokens
from tests.worker.fake_engine import FakeEngine
from tests.worker.queue_bench import SECONDS, QueueBench, until
from tests.worker.text_fixtures import CHATML, byte_level_backend, loaded
from worker.active import ActiveJob
from worker.config import Settings
from worker.service import Service
from worker.startup import Model


class Reply(msgspec.Struct, kw_only=True):
    """A whole reply as a client reads it, checked for gaps and repetitions."""

    ids: list[int]
    text: str
    end: Done | Error
    start: Start | None
    resumes: list[Resume]
    events: list[ReplyEvent]


class Worker:
    """A service running in a task."""

    def __init__(self, service: Service, engine: FakeEngine) -> None:
        self.service = service
        self.engine = engine
        self.task = asyncio.create_task(service.run())

    @property
    def ready(self) -> bool:
        return self.service.health.ready

    @property
    def jobs(self) -> list[ActiveJob]:
        assert self.service.running is not None
        return list(self.service.running.jobs)

    async def kill(self) -> None:
        """As SIGKILL would: nothing is handed back, nothing is renewed any more."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.service.shutdown.signal()
        async with asyncio.timeout(20):
            return await self.task


class ServiceBench:
    """Starts workers on the queue of a `QueueBench`."""

    def __init__(self, bench: QueueBench, url: str) -> None:
        self.bench = bench
        self.url = url
        self.workers: list[Worker] = []
        self.tokenizer = loaded(byte_level_backend(), chat_template=CHATML, eos_token="<|endoftext|>")

    def settings(self, **changes: Any) -> Settings:
        values = {"redis": self.url, "queue": self.bench.keys.queue, "metrics_port": 0, "lease": 0.6, "grace": 5.0}
        return Settings(**(values | {"model": "tiny"} | changes))

    async def start(
        self, *, wait: bool = True, digest: str = "digest", engine: FakeEngine | None = None, **changes: Any
    ) -> Worker:
        engine = engine or FakeEngine()
        model = Model(Path("tiny"), self.tokenizer, digest)
        worker = Worker(Service(self.settings(**changes), bridge=engine, load=lambda name: model), engine)  # type: ignore[arg-type]
        self.workers.append(worker)
        if wait:
            await self.until(lambda: worker.ready or worker.task.done(), "a ready worker")
            assert worker.ready, worker.task.result()
        return worker

    async def submit(
        self, job_id: str = "a", priority: str = "normal", entry: dict[str, Any] | None = None, **job: Any
    ) -> None:
        job = {"prompt": "hello", "max_tokens": 8, "temperature": 0} | job
        await self.bench.submit(job_id, priority, body=json.dumps(job), **(entry or {}))

    async def reply(self, job_id: str = "a") -> Reply:
        """Wait for the end of a reply, and check that nothing is missing or doubled."""
        events = await until(lambda: self._ended(job_id), f"the end of {job_id}")
        ids: list[int] = []
        text = ""
        for event in events:
            if isinstance(event, Tokens):
                assert (event.first, event.at) == (len(ids), len(text)), events
                ids += event.ids
                text += event.text
        end = events[-1]
        assert isinstance(end, Done | Error)
        assert [isinstance(event, Done | Error) for event in events].count(True) == 1
        return Reply(
            ids=ids,
            text=text + (end.text if isinstance(end, Done) else ""),
            end=end,
            start=next((event for event in events if isinstance(event, Start)), None),
            resumes=[event for event in events if isinstance(event, Resume)],
            events=events,
        )

    async def _ended(self, job_id: str) -> list[ReplyEvent] | None:
        """Its events once the last one is there. Asked for often, so a long reply is not read until then."""
        last = await self.bench.redis.xrevrange(self.bench.keys.out(job_id), count=1)
        if not last or last[0][0].decode() != TERMINAL_ENTRY_ID:
            return None
        events = await self.bench.events(job_id)
        return events if events and isinstance(events[-1], Done | Error) else None

    async def until_ended(self, job_id: str) -> None:
        await until(lambda: self._ended(job_id), f"the end of {job_id}")

    async def until_async(self, condition: Callable[[], Awaitable[object]], what: str, seconds: float = SECONDS) -> Any:
        return await until(condition, what, seconds)

    async def until(self, condition: Any, what: str, seconds: float = SECONDS) -> Any:
        async def check() -> object:
            return condition()

        return await until(check, what, seconds)

    async def published(self, job_id: str, count: int) -> None:
        """Wait until so many tokens of a job are published."""

        async def enough() -> bool:
            return int(await self.bench.field(job_id, "n") or 0) >= count

        await until(enough, f"{count} tokens of {job_id}")

    async def close(self) -> None:
        for worker in self.workers:
            worker.engine.go.set()
            worker.service.shutdown.signal()
            worker.service.shutdown.signal()
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(10):
                    await asyncio.gather(worker.task, return_exceptions=True)
            worker.task.cancel()
