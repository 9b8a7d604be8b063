"""What a worker claims when, and how it prepares it: room, suspects, and what has not begun when it is to stop."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.servers import first_kind
from tests.worker.fake_engine import FakeEngine, script
from tests.worker.service_bench import ServiceBench
from worker.intake import Intake
from worker.queue import Queue
from worker.service import OK

HELLO = [3 + byte for byte in b"hello"]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs each claim wanted."""
    claims: list[int] = []
    real = Queue.claim

    async def counted(self: Queue, want: int, active: object) -> object:
        claims.append(want)
        return await real(self, want, active)  # type: ignore[arg-type]

    monkeypatch.setattr(Queue, "claim", counted)
    return claims


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough here: nothing depends on it."""
    return first_kind()


async def test_full_worker_asks_for_nothing(crew: ServiceBench, claims: list[int]) -> None:
    engine = FakeEngine(max_sequences=1)
    engine.go.clear()
    worker = await crew.start(engine=engine, lease=3.0)
    for n in range(3):
        await crew.submit(f"j{n}", max_tokens=4)
    await crew.until(lambda: engine.added, "the first job in the engine")
    claims.clear()
    began = time.monotonic()
    await crew.until(lambda: time.monotonic() > began + 0.5, "half a second")

    assert claims == []
    engine.go.set()
    for n in range(3):
        assert (await crew.reply(f"j{n}")).ids == script(HELLO, 4)
    assert 0 not in claims
    assert await worker.stop() == OK


async def test_worker_that_could_not_renew_claims_nothing_before_it_has(
    crew: ServiceBench, claims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs may be others' by now, and its heartbeat old: it would be handed jobs that look as if it had died."""
    worker, real = await crew.start(), Queue.renew

    async def fails(self: Queue, *args: object) -> object:
        raise RedisConnectionError("gone")

    monkeypatch.setattr(Queue, "renew", fails)
    await crew.until(lambda: not worker.ready, "readiness to turn false")
    claims.clear()
    await crew.submit("a")
    began = time.monotonic()
    await crew.until(lambda: time.monotonic() > began + 0.5, "half a second")
    assert claims == []
    monkeypatch.setattr(Queue, "renew", real)

    assert (await crew.reply("a")).ids == script(HELLO, 8)


class Threads:
    """Who is being prepared, at every beginning of a preparation."""

    def __init__(self) -> None:
        self.together: list[set[str]] = []
        self._running: set[str] = set()
        self._lock = threading.Lock()

    @contextmanager
    def preparing(self, prompt: str) -> Iterator[None]:
        with self._lock:
            self._running.add(prompt)
            self.together.append(set(self._running))
        try:
            time.sleep(0.05)
            yield
        finally:
            with self._lock:
                self._running.discard(prompt)


async def test_suspect_is_prepared_with_nobody_beside_it(crew: ServiceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing it may be what killed its worker; whoever shared the threads would share the blame."""
    first = await crew.start()
    first.engine.go.clear()
    await crew.submit("suspect", prompt="suspect")
    await crew.until(lambda: first.engine.added, "the job in the engine")
    await first.kill()
    threads, real = Threads(), Intake.prepare

    def prepare(self: Intake, job: object, *rest: object) -> object:
        with threads.preparing(job.prompt):  # type: ignore[attr-defined]
            return real(self, job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Intake, "prepare", prepare)
    for n in range(200):  # both threads are busy until long after the lease's end
        await crew.submit(f"j{n}", prompt=f"p{n}", max_tokens=1)
    second = await crew.start(engine=FakeEngine(max_sequences=64))
    await crew.reply("suspect")

    assert {"suspect"} in threads.together
    assert [beside for beside in threads.together if "suspect" in beside and len(beside) > 1] == []
    assert max(map(len, threads.together)) == 2
    assert len(threads.together) < 200
    await second.stop()


async def test_sigterm_hands_back_what_has_not_begun_at_once_and_lets_the_rest_end(crew: ServiceBench) -> None:
    worker = await crew.start(lease=30.0, grace=60.0)
    await crew.submit("begun", max_tokens=300)
    await crew.published("begun", 3)
    worker.engine.go.clear()
    await crew.submit("waiting")
    await crew.until(lambda: len(worker.engine.added) == 2, "both jobs in the engine")

    worker.service.shutdown.signal()

    async def released() -> bool:
        return await crew.bench.field("waiting", "state") is None

    await crew.until_async(released, "the release")
    assert await crew.bench.field("begun", "state") == "running"
    worker.engine.go.set()
    assert await worker.task == OK
    assert (await crew.reply("begun")).ids == script(HELLO, 300)
    assert await crew.bench.field("waiting", "attempts") == "0"
