"""Runs a load: submits jobs when they are due, or when one of so many clients is free, and reads all replies.

An open load never waits for an answer: a job that is due is sent, however the queue is doing, and its latencies count
from when it was due. Otherwise a slow queue would slow its own load down, and look better than it is.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct
from redis.exceptions import RedisError

from gllm.client import Client
from gllm.keys import Keys
from gllm.protocol import Job
from worker.load.reader import Reader
from worker.load.record import Record
from worker.load.work import Vocabulary, Work

CANCEL_SECONDS = 10.0  # what cancelled jobs have to end in
TICK_SECONDS = 0.25


class Options(Struct, frozen=True, kw_only=True):
    """How a load is run. `clients`: None for an open load. `jobs`, `seconds`: where it ends, None: nowhere.

    `timeout`: seconds without an event after which a job is given up. `salt`: of the prefix cache, so that no run finds
    what one before it has left; None: it may.
    """

    url: str
    queue: str
    run: str
    seed: int
    vocabulary: Vocabulary
    clients: int | None = None
    jobs: int | None = None
    seconds: float | None = None
    timeout: float = 300.0
    salt: str | None = None
    ignore_eos: bool = True
    temperature: float = 1.0
    priority: str = "normal"
    connections: int = 4
    patience: float = 60.0


class Load:
    """`records` has every job that was due, in that order. Set `stop` to end early; `hurry`: without waiting."""

    def __init__(self, options: Options, work: Iterator[Work]) -> None:
        self.options = options
        self.records: list[Record] = []
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.began = 0.0
        self.finished = 0.0
        self.interrupted = False
        self._work = self._bounded(work)
        self._open: dict[str, Record] = {}
        self._submitting: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Until every job has ended. Raises redis-py's error when Redis was away for longer than `patience`."""
        options = self.options
        keys = Keys(options.queue)
        self._readers = [Reader(options.url, keys, options.patience) for _ in range(options.connections)]
        async with Client(options.url, options.queue, patience=options.patience) as self._client:
            parts = [asyncio.create_task(reader.run()) for reader in self._readers]
            parts.append(asyncio.create_task(self._give_up_silent()))
            try:
                await self._until_done(parts)
            finally:
                self.finished = time.monotonic()
                for part in (*parts, *self._submitting):
                    part.cancel()
                await asyncio.gather(*parts, *self._submitting, return_exceptions=True)

    async def _until_done(self, parts: "list[asyncio.Task[None]]") -> None:
        self.began = time.monotonic()
        arriving = asyncio.create_task(self._arrive())
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait([arriving, stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
            _raise_failure(parts)
            if arriving.done():
                arriving.result()
                waiting = asyncio.create_task(self._all_ended())
                await asyncio.wait([waiting, stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                _raise_failure(parts)
        finally:
            arriving.cancel()
            stopping.cancel()
            await asyncio.gather(arriving, return_exceptions=True)
        if self.stop.is_set():
            await self._cancel_open()

    async def _arrive(self) -> None:
        if self.options.clients is None:
            await self._open_loop()
        else:
            await asyncio.gather(*(self._client_loop() for _ in range(self.options.clients)))

    async def _open_loop(self) -> None:
        for work in self._work:
            prompt = self._prompt(work)  # before it is due: making it takes time
            due = self.began + (work.at or 0.0)
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            self._launch(self._record(work, due), prompt)
            await asyncio.sleep(0)

    async def _client_loop(self) -> None:
        for work in self._work:
            prompt = self._prompt(work)
            record = self._record(work, time.monotonic())
            self._launch(record, prompt)
            await record.done.wait()

    def _bounded(self, work: Iterator[Work]) -> Iterator[Work]:
        options = self.options
        for number, one in enumerate(work):
            moment = one.at if options.clients is None else time.monotonic() - self.began
            late = options.seconds is not None and (moment or 0.0) > options.seconds
            if late or number == options.jobs:
                return
            yield one

    def _prompt(self, work: Work) -> list[int]:
        return self.options.vocabulary.ids(work, self.options.seed)

    def _record(self, work: Work, due: float) -> Record:
        record = Record(f"{self.options.run}-{work.index}", work, due)
        self.records.append(record)
        self._open[record.id] = record
        return record

    def _launch(self, record: Record, prompt: list[int]) -> None:
        """In a task of its own: who stops the arrivals still reads what was submitted."""
        task = asyncio.create_task(self._submit(record, prompt))
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)

    def _job(self, record: Record, prompt: list[int]) -> Job:
        return Job(
            token_ids=prompt,
            max_tokens=record.work.max_tokens,
            ignore_eos=self.options.ignore_eos,
            temperature=self.options.temperature,
            seed=self.options.seed + record.work.index,
            cache_salt=self.options.salt,
        )

    async def _submit(self, record: Record, prompt: list[int]) -> None:
        options = self.options
        reader = min(self._readers, key=len)
        reader.add(record)
        record.sent = time.monotonic()
        try:
            await self._client.submit(self._job(record, prompt), id=record.id, priority=options.priority)
            record.accepted = time.monotonic()
            await record.done.wait()
        except (RedisError, ValueError) as error:
            record.end(f"submit {type(error).__name__}", time.monotonic(), str(error))
        finally:
            reader.forget(record)
            self._open.pop(record.id, None)

    async def _all_ended(self) -> None:
        while self._submitting:
            await asyncio.wait(self._submitting)

    async def _give_up_silent(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            limit = time.monotonic() - self.options.timeout
            for record in [one for one in self._open.values() if one.heard < limit]:
                record.end("timeout", time.monotonic(), f"no event for {self.options.timeout:g} seconds")
                with suppress(RedisError):
                    await self._client.cancel(record.id)

    async def _cancel_open(self) -> None:
        """Nothing that we have submitted goes on when we leave."""
        self.interrupted = True
        waiting = list(self._open.values())
        hurried = asyncio.create_task(self.hurry.wait())
        with suppress(TimeoutError, RedisError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await asyncio.gather(*(self._client.cancel(record.id) for record in waiting))
                ended = asyncio.create_task(self._all_ended())
                await asyncio.wait([ended, hurried], return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
        hurried.cancel()
        for record in waiting:
            record.end("unfinished", time.monotonic())


def _raise_failure(parts: "list[asyncio.Task[None]]") -> None:
    for part in parts:
        if part.done():
            part.result()
