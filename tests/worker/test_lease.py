"""The loop that keeps the lease, on its own."""

import time

import pytest
from redis.asyncio import Redis

from gllm.connection import connect
from tests.worker.test_jobs import Commands
from tests.worker.text_fixtures import engine_info
from worker.health import Health
from worker.jobs import Jobs
from worker.lease import Lease
from worker.link import Link
from worker.metrics import Metrics
from worker.queue import RedisClock
from worker.scripts import Renewal


class LostQueue:
    """A queue after a flush, as far as a lease asks: notes the client of every command."""

    lease = 0.3
    clock = RedisClock()

    def __init__(self) -> None:
        self.clients: list[Redis | None] = []

    async def renew(self, jobs: object, heartbeat: object, redis: Redis | None = None) -> Renewal:
        self.clients.append(redis)
        return Renewal(1, known=False, answers=[], waiting={})

    async def join(self, model: str, redis: Redis | None = None) -> int:
        self.clients.append(redis)
        return 0

    async def reap(self, redis: Redis | None = None) -> int:
        self.clients.append(redis)
        return 0


def lease_of(queue: LostQueue, redis: Redis, metrics: Metrics) -> Lease:
    jobs = Jobs("w", engine_info(), Commands(), metrics)
    return Lease(queue, redis, jobs, Link(Health(), metrics), metrics, dict, "model")  # type: ignore[arg-type]


async def test_nothing_in_the_lease_loop_waits_with_the_patience_of_other_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reap or a join that hangs for the main client's 5 s would keep a lost Redis from readiness and self-fence."""
    impatient, queue = connect("redis://127.0.0.1:1"), LostQueue()
    lease = lease_of(queue, impatient, Metrics())
    monkeypatch.setattr(lease, "_next_reap", time.monotonic())

    await lease._turn()

    assert queue.clients == [impatient] * 3


async def test_redis_that_somebody_else_lost_is_asked_again_at_once_and_not_when_the_lease_is_due() -> None:
    lease = lease_of(LostQueue(), connect("redis://127.0.0.1:1"), Metrics())
    lease._link.restored()
    lease._due = due = time.monotonic() + 60
    lease._watch()
    assert lease._due == due

    lease._link.lost(ConnectionError("gone"))
    lease._watch()
    assert lease._due < time.monotonic() + 1


async def test_loss_of_the_meta_alone_is_counted_too() -> None:
    """The groups are there, so none is made; what heals itself is never silent."""
    metrics = Metrics()
    await lease_of(LostQueue(), connect("redis://127.0.0.1:1"), metrics)._turn()
    assert 'gllm_recoveries_total{path="group_lost"} 1.0' in metrics.render().decode()
