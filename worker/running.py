"""A worker that serves: its parts, wired; how they run side by side, drain, and hand their jobs back."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import structlog
from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import RedisError

from worker import logs, perfstats, watchdog
from worker.active import ActiveJob
from worker.admission import Admission
from worker.bridge import Bridge, EngineDied
from worker.claimer import Claimer, first_of
from worker.connection import cancelled
from worker.health import Health
from worker.heartbeat import heartbeat
from worker.intake import Intake
from worker.jobs import Jobs
from worker.lease import Lease
from worker.link import Link
from worker.metrics import Metrics, loop
from worker.publisher import Publisher
from worker.queue import Queue
from worker.rows import Answer
from worker.startup import Model

LAST_WORDS_SECONDS = 5.0  # for what goes to Redis at the end; without it the lease runs out and says the same


class Shutdown:
    """SIGTERM: `requested`, and all jobs may end within the grace time; a second one: `hurried`, now."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()

    def signal(self) -> None:
        (self.hurried if self.requested.is_set() else self.requested).set()


class Clients(Struct, frozen=True):
    """Redis clients by patience: `main` for scripts, `lease` for renewals, `bell` for blocking reads."""

    main: Redis
    lease: Redis
    bell: Redis

    async def close(self) -> None:
        for client in (self.main, self.lease, self.bell):
            await client.aclose()


class Running:
    """The parts of a worker from the moment that its engine is loaded and its queue joined."""

    def __init__(
        self, queue: Queue, clients: Clients, bridge: Bridge, model: Model, health: Health, metrics: Metrics
    ) -> None:
        self.link = Link(health, metrics)
        self.jobs = Jobs(queue.worker, bridge.info, bridge, metrics)
        self._queue = queue
        self._bridge = bridge
        self._health = health
        self._metrics = metrics
        metrics.worker.active = lambda: len(self.jobs)
        self._publisher = Publisher(queue, self.link, self.jobs)
        self.jobs.changed, self.jobs.forget = self._publisher.changed, self._publisher.forget
        self._intake = Intake(model.tokenizer, bridge.info, model.defaults)
        self._admission = Admission(queue, self.link, self.jobs, self._intake)
        self._claimer = Claimer(queue, clients.bell, self.link, self.jobs, self._admission, metrics)
        beat = heartbeat(queue.worker, bridge)
        self._lease = Lease(queue, clients.lease, self.jobs, self.link, metrics, beat, model.digest)
        self._parts: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger()

    async def serve(self, shutdown: Shutdown, grace: float) -> Exception | None:
        """Work until a signal or a failure, then hand back what is left. The failure, if there was one."""
        self._begin()
        try:
            return await self._serve(shutdown, grace)
        finally:
            self._claiming.cancel()  # long done, unless we are cancelled ourselves
            await self._stop_parts()
            self._intake.close()

    async def _serve(self, shutdown: Shutdown, grace: float) -> Exception | None:
        self._health.to("ready")
        failure = await self._until(shutdown.requested.wait())
        if failure is None:
            self._health.to("draining")
            failure = await self._stop_claiming()
        if failure is None:
            self._log.info(logs.DRAINING, jobs=len(self.jobs), grace=grace)
            failure = await self._until(self._drain(shutdown, grace))
        if failure is not None:
            self._health.to("failed", str(failure))
        await self._hand_back(failure)
        return failure

    def _begin(self) -> None:
        parts: dict[str, Coroutine[Any, Any, None]] = {
            "lease": self._lease.run(),
            "publisher": self._publisher.run(),
            "engine": self._pump(),
            "watch": self._watch_engine(),
            "perfstats": perfstats.report(lambda: self._bridge.stats),
            "loop lag": loop.watch(self._metrics.loop_lag),
        }
        self._parts = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        self._claiming = asyncio.create_task(self._claimer.run(), name="claimer")
        self._parts.append(self._claiming)
        self._intake.start()

    async def _stop_claiming(self) -> Exception | None:
        """Let the claim in flight come back, and make no other. What it failed with, if it did."""
        self._claimer.stop()
        (result,) = await asyncio.gather(self._claiming, return_exceptions=True)
        if self._claiming in self._parts:
            self._parts.remove(self._claiming)
        return result if isinstance(result, Exception) else None

    async def _until(self, waiting: Coroutine[Any, Any, Any]) -> Exception | None:
        """Wait; None once it is over, or what failed meanwhile: Redis, a part, or what was waited for itself."""
        task = asyncio.create_task(waiting)
        await asyncio.wait([task, *self._parts, self.link.fatal], return_when=asyncio.FIRST_COMPLETED)
        failed = [part for part in self._parts if part.done()]
        if not task.done():
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if self.link.fatal.done():
            return self.link.fatal.result()
        if failed:
            return _failure_of(failed[0])
        return result if isinstance(result, Exception) else None

    async def _pump(self) -> None:
        async for deltas in self._bridge.deltas():
            self.jobs.step(deltas)

    async def _watch_engine(self) -> None:
        """An engine that hangs is dead: liveness goes at once, and nobody waits for its process to admit it."""
        reason = await watchdog.hang(self._bridge, lambda: self.jobs.stepping)
        self._health.to("failed", reason)
        self._log.error(logs.ENGINE_HUNG, message=reason)
        in_flight = self._bridge.in_flight
        self._bridge.kill()
        raise EngineDied(reason, in_flight)

    # -- the end --------------------------------------------------------------------------------------------------

    async def _drain(self, shutdown: Shutdown, grace: float) -> None:
        """Hand back what has not begun; let the others end within the grace time."""
        await self._admission.close()
        await self._release([job for job in self.jobs if not job.started and job.terminal is None], frozenset())
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await first_of(self.jobs.wait_empty(), shutdown.hurried)

    async def _hand_back(self, failure: Exception | None) -> None:
        """Release everything that is left, those charged that the engine died with, and leave the queue."""
        charged = frozenset(failure.in_flight if isinstance(failure, EngineDied) else ())
        await self._stop_claiming()
        await self._admission.close()
        await self._stop_parts(keep="lease")  # it keeps what is not handed back yet, and finds a lost Redis again
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                while len(self.jobs) and not self.link.fatal.done() and not cancelled():
                    await self._last_words(charged)
                await self._leave()
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            self._log.warning(logs.REDIS_LOST, error=f"{type(error).__name__}: {error}", jobs_left=self.jobs.ids)
        for job in self.jobs:  # their lease runs out
            self.jobs.on_left(job, "abandoned")

    async def _last_words(self, charged: frozenset[str]) -> None:
        """Publish what there is, then release what has not ended; all of it again if Redis fails meanwhile."""
        await self.link.wait_up()
        if await self._publisher.flush():
            await self._release([job for job in self.jobs if job.terminal is None], charged)
            await asyncio.sleep(0)

    async def _leave(self) -> None:
        """The goodbye, after the last renewal."""
        self._lease.stop()
        await asyncio.gather(*(part for part in self._parts if part.get_name() == "lease"), return_exceptions=True)
        await self._queue.leave()

    async def _stop_parts(self, keep: str = "") -> None:
        stopping = [part for part in self._parts if part.get_name() != keep]
        for part in stopping:
            part.cancel()
        await asyncio.gather(*stopping, return_exceptions=True)

    async def _release(self, jobs: list[ActiveJob], charged: frozenset[str]) -> None:
        if not jobs:
            return
        self._log.info(logs.RELEASING, jobs=len(jobs), charged=len(charged))
        for job in jobs:
            job.releasing = True
        try:
            answers = await self._queue.release([job.claimed for job in jobs], charged)
        except (RedisError, OSError) as error:
            self.link.lost(error)
            return
        finally:
            for job in jobs:
                job.releasing = False
        for job, answer in zip(jobs, answers, strict=True):
            if self.jobs.has(job):  # else it has ended meanwhile, or the publisher was told first
                self._released(job, answer, charged=job.id in charged)

    def _released(self, job: ActiveJob, answer: Answer, *, charged: bool) -> None:
        if answer.status == "GONE":  # nobody else could take it over
            self.jobs.fail(job, "internal", "the job's entry was deleted while it ran", retryable=True)
        elif answer.status == "OK":
            self._metrics.released.add()
            job.log.info(logs.JOB_RELEASED, charged=charged)
            self.jobs.drop(job, "released")
        else:
            self.jobs.fenced(job)


def _failure_of(part: "asyncio.Task[None]") -> Exception:
    error = None if part.cancelled() else part.exception()
    return error if isinstance(error, Exception) else RuntimeError(f"the {part.get_name()} ended by itself")
