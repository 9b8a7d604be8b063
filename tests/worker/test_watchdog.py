"""An engine that makes no progress: when it is given up, and what becomes of its jobs and of the worker."""

import asyncio
import time

import pytest

from tests.servers import first_kind
from tests.worker.fake_engine import FakeEngine, script
from tests.worker.service_bench import ServiceBench
from worker import watchdog
from worker.service import FAILED, OK

HELLO = [3 + byte for byte in b"hello"]


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough here: nothing depends on it."""
    return first_kind()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HANG_SECONDS", 0.4)
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.02)


class Silent:
    """An engine that says nothing."""

    last_step = 0.0
    compiling: str | None = None


def given_up(engine: Silent, *, stepping: bool = True) -> "asyncio.Task[str]":
    return asyncio.create_task(watchdog.hang(engine, lambda: stepping))


def test_limits_are_a_minute_for_a_step_and_a_quarter_of_an_hour_for_one_that_compiles() -> None:
    engine = Silent()
    assert watchdog.limit(engine) == 60
    engine.compiling = "paged attention"
    assert watchdog.limit(engine) == 15 * 60


@pytest.mark.usefixtures("impatient")
async def test_silence_with_work_is_a_hang_and_silence_without_is_none() -> None:
    began = time.monotonic()
    idle = given_up(Silent(), stepping=False)

    assert await given_up(Silent()) == "no step ended in 0.4 s with work to do"

    assert time.monotonic() - began >= 0.4
    assert not idle.done()
    idle.cancel()


@pytest.mark.usefixtures("impatient")
async def test_each_step_is_a_new_beginning() -> None:
    engine = Silent()
    watching = given_up(engine)
    for _ in range(8):
        await asyncio.sleep(0.1)
        engine.last_step += 1.0

    assert not watching.done()
    await watching


@pytest.mark.usefixtures("impatient")
async def test_what_compiles_may_take_longer_and_is_named_when_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "COMPILE_SECONDS", 1.0)
    engine = Silent()
    engine.compiling = "a graph of 8 rows"
    began = time.monotonic()

    assert await given_up(engine) == "no step ended in 1 s with work to do while compiling a graph of 8 rows"
    assert time.monotonic() - began >= 1.0


@pytest.mark.usefixtures("impatient")
async def test_time_in_which_the_worker_itself_was_frozen_is_not_the_engines() -> None:
    watching = given_up(Silent())
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251 (as SIGSTOP and SIGCONT would)
    for _ in range(5):
        await asyncio.sleep(0)

    assert not watching.done()
    await watching


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("unkillable", [False, True], ids=["dies", "waits in a driver for ever"])
async def test_hanging_engine_fails_liveness_and_ends_the_worker_with_its_step_charged(
    crew: ServiceBench, unkillable: bool
) -> None:
    worker = await crew.start(lease=30.0)
    for job_id in ("stepped", "waiting"):
        await crew.submit(job_id, max_tokens=4000)
        await crew.published(job_id, 3)
    worker.engine.in_flight, worker.engine.unkillable = ["stepped"], unkillable
    worker.engine.go.clear()

    async with asyncio.timeout(10):
        assert await worker.task == FAILED

    health = worker.service.health
    assert (worker.engine.killed, health.live) == (True, False)
    assert health.reason == "no step ended in 0.4 s with work to do"
    assert [await crew.bench.field(job_id, "attempts") for job_id in ("stepped", "waiting")] == ["1", "0"]
    assert [await crew.bench.field(job_id, "state") for job_id in ("stepped", "waiting")] == [None, None]


@pytest.mark.usefixtures("impatient")
async def test_idle_engine_and_one_whose_jobs_are_held_do_not_hang(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01))
    worker.engine.go.clear()  # it says nothing, as an idle one may
    await asyncio.sleep(0.6)
    assert worker.service.health.live
    worker.engine.go.set()
    await crew.submit("a", max_tokens=40)
    await crew.published("a", 1)
    for job in worker.jobs:
        worker.service.running.jobs._hold(job, "pause")  # type: ignore[union-attr]
    worker.engine.go.clear()
    await asyncio.sleep(0.6)
    assert worker.service.health.live
    worker.engine.go.set()
    worker.service.running.jobs.resume()  # type: ignore[union-attr]

    assert (await crew.reply("a")).ids == script(HELLO, 40)
    assert await worker.stop() == OK


@pytest.mark.usefixtures("impatient")
async def test_step_that_compiles_is_waited_for(crew: ServiceBench) -> None:
    worker = await crew.start()
    worker.engine.go.clear()
    await crew.submit("a")
    await crew.until(lambda: worker.engine.added, "the job in the engine")
    worker.engine.compiling = "paged attention"
    await asyncio.sleep(0.8)
    assert worker.ready
    worker.engine.go.set()

    assert (await crew.reply("a")).ids == script(HELLO, 8)
