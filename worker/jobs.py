"""The jobs of this worker: what the engine, Redis and the clock have to say about each, and where it goes then."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Protocol

from engine.request import Delta, FinishReason, Request, Stats
from engine.wire import EngineInfo
from worker import logs
from worker.active import ActiveJob
from worker.metrics import Metrics
from worker.queue import Claimed

BUFFER_TOKENS = 256  # unpublished tokens of a job, while Redis is away, after which it is not stepped any more
BUFFER_LOW = 128  # and how few of them let it go on
ON_THEIR_WAY = 16  # jobs in the engine that it has not said anything of; beyond, another worker should have them


class Steps(Protocol):
    """What is used of the bridge: its newest snapshot, and its commands, none of which blocks."""

    stats: Stats

    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def hold(self, request_id: str) -> None: ...
    def unhold(self, request_id: str) -> None: ...


class Jobs:
    """All jobs from claim to end. It listens to the publisher (see `publisher.Listener`) and tells it what changed."""

    def __init__(self, worker: str, info: EngineInfo, engine: Steps, metrics: Metrics) -> None:
        self.changed: Callable[[ActiveJob], None] = lambda job: None  # set to the publisher's
        self.forget: Callable[[ActiveJob], None] = lambda job: None
        self.on_left: Callable[[ActiveJob, str], None] = lambda job, how: None  # see `Traces.left`
        self.on_room: Callable[[], None] = lambda: None  # `room` may have grown
        self.on_acquitted: Callable[[], None] = lambda: None  # a suspect has made a token, or is gone
        self._worker = worker
        self._info = info
        self._engine = engine
        self._metrics = metrics
        self._jobs: dict[str, ActiveJob] = {}
        self._leaving: set[str] = set()  # cancelled in the engine, which has not said its last word of them
        self._paused = False
        self._gone = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[ActiveJob]:
        return iter(list(self._jobs.values()))

    @property
    def ids(self) -> list[str]:
        """What must not be claimed here: an id that the engine still knows would be refused, or get another's end."""
        return [*self._jobs, *self._leaving]

    @property
    def claimed(self) -> list[Claimed]:
        return [job.claimed for job in self._jobs.values()]

    @property
    def room(self) -> int:
        """Jobs that the engine could take now: rows that are free, none while one waits there for memory.

        A few may be on their way into the engine, so that jobs that come during a long step join the next one together.
        """
        if self._engine.stats.waiting:
            return 0
        running = [job for job in self._jobs.values() if job.terminal is None]
        on_their_way = sum(1 for job in running if job.in_engine and not job.started)
        return max(0, min(self._info.max_sequences - len(running), ON_THEIR_WAY - on_their_way))

    @property
    def stepping(self) -> bool:
        """Whether the engine has something to step."""
        return any(job.in_engine and not job.holds for job in self._jobs.values())

    def has(self, job: ActiveJob) -> bool:
        """Whether the job is still here, ended or not."""
        return self._jobs.get(job.id) is job

    def owns(self, job: ActiveJob) -> bool:
        """Whether the job is still to be worked on."""
        return self.has(job) and job.terminal is None

    async def wait_empty(self) -> None:
        """Until every job has ended or gone."""
        while self._jobs:
            self._gone.clear()
            await self._gone.wait()

    def take(self, claimed: Claimed) -> ActiveJob:
        """A job was claimed."""
        job = self._jobs[claimed.id] = ActiveJob(claimed, self._metrics)
        self._metrics.claimed.add()
        path = "" if claimed.claims == 1 else ("redelivered" if claimed.taken_from else "released")
        if path:
            self._metrics.recovery(path)
        event, level = (logs.JOB_REDELIVERED, logging.INFO) if path else (logs.JOB_CLAIMED, logging.DEBUG)
        job.log.log(level, event, published=claimed.published)
        return job

    def start(self, job: ActiveJob, request: Request) -> None:
        """Hand a prepared job to the engine."""
        job.in_engine = True
        job.clock.given = time.monotonic()
        self._engine.add(request)
        if self._paused:
            self._hold(job, "pause")

    # -- what the engine says -------------------------------------------------------------------------------------

    def step(self, deltas: Iterable[Delta]) -> None:
        """What one step brought. Deltas of jobs that have ended or gone are left-overs of a cancel."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self._leaving.discard(delta.id)
            job = self._jobs.get(delta.id)
            if job is not None and job.terminal is None and job.reply is not None:
                self._apply(job, delta)
        if not self._engine.stats.waiting:
            self.on_room()  # the one that waited may have been preempted: its return is no admission

    def _apply(self, job: ActiveJob, delta: Delta) -> None:
        if delta.finish_reason is FinishReason.ERROR:
            self.fail(job, delta.refusal or "internal", delta.error or "the engine gave no reason", in_engine=False)
            return
        if not job.started:
            self._admitted(job, delta)
        job.preemptions = delta.usage.preemptions
        if delta.prompt_logprobs is not None:
            job.set_prompt_logprobs(delta.prompt_logprobs)
        ending = job.push(delta.tokens, delta.logprobs)
        if ending is not None:
            self.end(job, ending.finish_reason, ending.stop, in_engine=delta.finish_reason is None)
        elif delta.finish_reason is not None:
            self.end(job, _reason(delta.finish_reason), in_engine=False)
        elif job.unpublished >= BUFFER_TOKENS:
            self._hold(job, "buffer")
        self.changed(job)

    def _admitted(self, job: ActiveJob, delta: Delta) -> None:
        job.admitted(self._worker, self._info.numerics, self._info.deterministic, delta.usage.cached_tokens)
        resumed = job.claimed.published > 0
        if resumed:
            self._metrics.recovery("resumed")
        job.log.info(logs.JOB_RESUMED if resumed else logs.JOB_STARTED, prompt_tokens=job.prompt_tokens)
        self.on_room()

    # -- how a job ends -------------------------------------------------------------------------------------------

    def end(
        self,
        job: ActiveJob,
        reason: Literal["stop", "length", "cancelled", "deadline"],
        stop: str | int | None = None,
        *,
        in_engine: bool = True,
    ) -> None:
        """Give the job its terminal event, unless it has one. `in_engine`: the engine does not know of the end."""
        if self.owns(job):
            job.done(reason, stop)
            self._leave_engine(job, cancel=in_engine)
            self.changed(job)

    def fail(
        self,
        job: ActiveJob,
        code: Literal["invalid", "unsupported", "too_large", "internal"],
        message: str,
        *,
        retryable: bool = False,
        in_engine: bool = True,
    ) -> None:
        """End the job with an error, unless it has ended. `in_engine` as in `end`."""
        if self.owns(job):
            job.failed(code, message, retryable=retryable)
            job.log.info(logs.JOB_REJECTED, code=code, message=logs.without_value(message))
            self._leave_engine(job, cancel=in_engine)
            self.changed(job)

    def _leave_engine(self, job: ActiveJob, *, cancel: bool) -> None:
        if job.in_engine and cancel:
            self._engine.cancel(job.id)
            self._leaving.add(job.id)
        job.in_engine = False
        self.on_room()

    def end_overdue(self, now_ms: int) -> None:
        """End the jobs whose deadline has passed on Redis' clock."""
        for job in self:
            if job.claimed.deadline_ms is not None and job.claimed.deadline_ms <= now_ms:
                self.end(job, "deadline")

    def drop(self, job: ActiveJob, how: Literal["fenced", "released"]) -> None:
        """It is not this worker's any more; nothing is written of it."""
        if self.has(job):
            del self._jobs[job.id]
            self._gone.set()
            self.forget(job)
            self._leave_engine(job, cancel=True)
            self._acquit(job)
            self.on_left(job, how)

    # -- what Redis says (publisher.Listener, and the lease) ------------------------------------------------------

    def published(self, job: ActiveJob) -> None:
        if job.on_trial and job.published > job.claimed.published:
            self._acquit(job)
        if job.unpublished <= BUFFER_LOW:
            self._unhold(job, "buffer")

    def _acquit(self, job: ActiveJob) -> None:
        if job.on_trial:
            job.on_trial = False
            self.on_acquitted()

    def repaired(self, job: ActiveJob) -> None:
        self._metrics.recovery("repaired")
        job.log.info(logs.JOB_REPAIRED, n=job.published)

    def cancelled(self, job: ActiveJob) -> None:
        if self.owns(job):
            job.log.info(logs.JOB_CANCELLED)
            self.end(job, "cancelled")

    def fenced(self, job: ActiveJob) -> None:
        if self.has(job):
            self._metrics.redis_error("fenced")
            self._metrics.recovery("fenced")
            job.log.info(logs.JOB_FENCED)
            self.drop(job, "fenced")

    def unpublishable(self, job: ActiveJob, message: str) -> None:
        """Only its reply's key can be at fault. The finish script ends it, with a dead letter if all else fails."""
        if self.has(job) and not job.abandoned:
            job.give_up()
            self.fail(job, "internal", f"the reply cannot be written: {message}")

    def buried(self, job: ActiveJob) -> None:
        """Its terminal event could not be written either: the finish script made a dead letter of it."""
        if self.has(job):  # a second try to end it hears the same
            self._metrics.dead_letter("unpublishable")
            job.log.warning(logs.DEAD_LETTER, reason="unpublishable", written=True)

    def ended(self, job: ActiveJob) -> None:
        if self._jobs.pop(job.id, None) is not None:
            self._gone.set()
            job.clock.end(job.outcome, time.monotonic())
            job.log.info(logs.JOB_ENDED, outcome=job.outcome, tokens=job.n)
            self._acquit(job)
            self.on_room()
            self.on_left(job, job.outcome)

    def renewed(self, claimed: Claimed, status: str) -> None:
        """The answer of a renewal about one job. One that ends here or is handed back hears the same of that, or OK."""
        job = self._jobs.get(claimed.id)
        if job is None or job.claimed is not claimed or job.terminal is not None or job.releasing:
            return
        if status == "FENCED":
            self.fenced(job)
        elif status == "CANCEL":
            self.cancelled(job)

    # -- holding --------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Self-fence: step nothing, keep everything."""
        self._paused = True
        for job in self._jobs.values():
            self._hold(job, "pause")

    def resume(self) -> None:
        self._paused = False
        for job in self._jobs.values():
            self._unhold(job, "pause")

    def _hold(self, job: ActiveJob, why: str) -> None:
        if job.in_engine and not job.holds:
            self._engine.hold(job.id)
        if job.in_engine:
            job.holds.add(why)

    def _unhold(self, job: ActiveJob, why: str) -> None:
        if why in job.holds:
            job.holds.discard(why)
            if job.in_engine and not job.holds:
                self._engine.unhold(job.id)


def _reason(reason: FinishReason) -> Literal["stop", "length", "cancelled"]:
    assert reason is not FinishReason.ERROR
    return reason.value
