"""The lease on this worker's jobs: renewal, heartbeat, self-fence, deadlines, and the reaper of dead consumers.

It runs beside the engine and never waits for it. It is also the one that finds out when a lost Redis is back: a renewal
comes before anything else, so that nobody publishes or claims on a lease that has run out.
"""

import asyncio
import random
import time
from collections.abc import Callable

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from worker import logs
from worker.connection import cancelled
from worker.jobs import Jobs
from worker.link import Link
from worker.metrics import LeaseTime, Metrics
from worker.queue import Queue

RENEWALS_PER_LEASE = 3
FENCE_AT = 0.8  # of the lease: what is stepped after that would likely be another worker's
TICK_SECONDS = 0.05  # how exact deadlines and self-fence are
BACKOFF_SECONDS = (0.05, 1.0)  # first and longest pause between attempts to reach Redis
PATIENCE_SECONDS = (0.25, 0.8)  # for one renewal: readiness has to turn false lease/3 + 1 s after Redis fell silent
REAP_LEASES = 5.0


def patience(lease: float) -> float:
    """Socket timeout, in seconds, of the client that renews."""
    low, high = PATIENCE_SECONDS
    return min(high, max(low, lease / 6))


class Lease:
    """Keeps the lease; stop it when all jobs have ended or are handed back.

    `redis` is a client of its own, with `patience(lease)` as timeout, and nothing here waits for another: a Redis that
    fell silent would be noticed too late. `heartbeat` is asked anew for each renewal. `model` is the digest to join
    with again when the queue's meta was lost.
    """

    def __init__(
        self,
        queue: Queue,
        redis: Redis,
        jobs: Jobs,
        link: Link,
        metrics: Metrics,
        heartbeat: Callable[[], dict[str, str]],
        model: str,
    ) -> None:
        self._queue = queue
        self._redis = redis
        self._jobs = jobs
        self._link = link
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._model = model
        self._renewed = time.monotonic()
        self._due = 0.0
        self._pause = BACKOFF_SECONDS[0]
        self._fenced = False
        self._stopping = False
        self._next_reap = time.monotonic() + queue.lease * REAP_LEASES * random.uniform(0.5, 1.5)
        self._log = structlog.get_logger()
        metrics.worker.lease = lambda: LeaseTime(queue.lease, self._renewed)
        metrics.queue.life = max(metrics.queue.life, queue.lease)  # a full worker looks thrice a lease only

    async def run(self) -> None:
        """Until stopped or cancelled: renew when it is due or Redis was lost, and keep deadlines meanwhile."""
        while not self._stopping and not cancelled():
            if time.monotonic() >= self._due:
                await self._turn()
            self._watch()
            await asyncio.sleep(min(TICK_SECONDS, self._queue.lease / 12))

    def stop(self) -> None:
        """Renew nothing from now on; `run` returns once the renewal in flight has come back.

        Who leaves the queue waits for that: a renewal that the server saw after the goodbye would sign us in again.
        """
        self._stopping = True

    def hurry(self) -> None:
        """Renew at the next tick (somebody saw Redis fail)."""
        self._due = min(self._due, time.monotonic() + self._pause)

    async def _turn(self) -> None:
        began = time.monotonic()
        if await self._renew():
            self._renewed, self._pause = began, BACKOFF_SECONDS[0]
            self._due = began + self._queue.lease / RENEWALS_PER_LEASE
        else:
            self._due = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, BACKOFF_SECONDS[1], self._queue.lease / RENEWALS_PER_LEASE)

    async def _renew(self) -> bool:
        """One renewal of everything; whether it went through."""
        claimed = self._jobs.claimed
        try:
            renewal = await self._queue.renew(claimed, self._heartbeat(), self._redis)
            if not renewal.known:
                await self._rejoin()
            await self._reap()
        except (RedisError, OSError) as error:
            self._link.lost(error)
            return False
        for job, answer in zip(claimed, renewal.answers, strict=True):
            self._jobs.renewed(job, answer.status)
        self._metrics.queue.renewal(renewal.waiting, renewal.now_ms)  # a full worker does not claim, so no claim tells
        self._link.restored()
        self._lift()
        return True

    async def _rejoin(self) -> None:
        """The queue's meta is gone: a flush. Raises QueueMismatch when another model has founded it anew."""
        made = await self._queue.join(self._model, self._redis)
        self._metrics.recovery("group_lost", max(1, made))  # also where only the meta was lost
        self._log.warning(logs.GROUP_LOST, groups=made)

    async def _reap(self) -> None:
        if time.monotonic() < self._next_reap:
            return
        self._next_reap = time.monotonic() + self._queue.lease * REAP_LEASES * random.uniform(0.75, 1.25)
        if reaped := await self._queue.reap(self._redis):
            self._metrics.recovery("consumer_reaped", reaped)
            self._log.info(logs.CONSUMER_REAPED, consumers=reaped)

    def _watch(self) -> None:
        """Between renewals: deadlines, the self-fence, and a Redis that others lost."""
        self._jobs.end_overdue(self._queue.clock.now_ms())
        if not self._link.up:
            self.hurry()
        if not self._fenced and time.monotonic() > self._renewed + FENCE_AT * self._queue.lease:
            self._fenced = True
            self._jobs.pause()
            self._metrics.recovery("paused")
            self._log.warning(logs.SELF_FENCED, seconds=round(time.monotonic() - self._renewed, 3))

    def _lift(self) -> None:
        if self._fenced:
            self._fenced = False
            self._jobs.resume()
            self._log.info(logs.LEASE_RENEWED, jobs=len(self._jobs))
