"""A worker that takes over from a dead one while new jobs wait, too: those that had begun come first."""

import time

import pytest

from gllm.keys import GROUP
from tests.worker.fake_engine import FakeEngine
from tests.worker.service_bench import ServiceBench, Worker
from worker.queue import SCAN_SECONDS, Queue

ROOM = 6
BEGUN = [f"begun-{n}" for n in range(ROOM)]


async def full_worker(crew: ServiceBench, *jobs: str) -> Worker:
    """A worker with as many jobs as it can hold."""
    worker = await crew.start(engine=FakeEngine(max_sequences=ROOM))
    for job_id in jobs:
        await crew.submit(job_id, max_tokens=2000)
    await crew.until(lambda: len(worker.engine.added) == ROOM, "a full worker")
    return worker


async def heir_of_orphans_beside_a_backlog(crew: ServiceBench) -> Worker:
    """A full worker; six jobs of another one, whose lease is over; and new jobs."""
    heir = await full_worker(crew, *(f"filler-{n}" for n in range(ROOM)))
    next_scan = time.monotonic() + SCAN_SECONDS
    dead = await full_worker(crew, *BEGUN)
    await dead.kill()
    for n in range(10):
        await crew.submit(f"new-{n}", max_tokens=2000)
    stream, lease_ms = crew.bench.keys.jobs("normal", 0), int(1000 * heir.service.settings.lease)

    async def expired() -> bool:
        return len(await crew.bench.redis.xpending_range(stream, GROUP, "-", "+", 100, idle=lease_ms)) == ROOM

    await crew.until_async(expired, "the end of the lease")
    await crew.until(lambda: time.monotonic() >= next_scan, "the time when a claim looks for expired entries")
    return heir


async def make_room(crew: ServiceBench) -> None:
    """Cancel what fills the worker."""
    for n in range(ROOM):
        await crew.bench.redis.set(crew.bench.keys.cancel(f"filler-{n}"), 1, ex=60)


async def test_orphans_of_a_dead_worker_run_before_a_backlog(
    crew: ServiceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.REVERSED_EVERY", 10**6)
    heir = await heir_of_orphans_beside_a_backlog(crew)

    await make_room(crew)

    await crew.until(lambda: len(heir.engine.added) == 2 * ROOM, "a full worker")
    assert [request.id for request in heir.engine.added[ROOM:]] == BEGUN


async def test_trial_that_lasts_leaves_new_jobs_their_turn_and_does_not_make_the_worker_ask_and_ask(
    crew: ServiceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.REVERSED_EVERY", 2)
    heir = await heir_of_orphans_beside_a_backlog(crew)
    asked: list[int] = []
    claim = Queue.claim

    async def counted(queue: Queue, want: int, active: list[str]) -> object:
        asked.append(want)
        return await claim(queue, want, active)

    heir.engine.go.clear()
    monkeypatch.setattr(Queue, "claim", counted)
    await make_room(crew)

    await crew.until(lambda: len(heir.engine.added) == 2 * ROOM, "a full worker")
    assert {request.id for request in heir.engine.added[ROOM:]} == {BEGUN[0], *(f"new-{n}" for n in range(ROOM - 1))}
    assert len(asked) < 10
