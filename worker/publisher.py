"""From replies to Redis: all jobs' new tokens in one script call per flush, terminal events in a second one.

How long a token waits. A job's first token and its end are flushed at once. Other tokens are flushed as soon as the
flush before is done, unless flushes take long: they may fill half of the time. So a token waits for others at most as
long as the last flush took, and no flush is put off beyond 40 ms after the last one began. On a server with time to
spare nothing waits, and a step of the engine becomes an entry per job. On a busy one (its other workers count, for they
lengthen the flushes as well) steps share an entry: fewer calls, and a reply that takes a fifth of the memory.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from redis.exceptions import RedisError

from worker.active import ActiveJob
from worker.connection import cancelled
from worker.link import Link
from worker.queue import Queue
from worker.rows import Answer, AppendRow

MERGE_FACTOR = 2  # times the length of a flush, from its beginning to that of the next
MERGE_SECONDS = 0.04  # at most that; below what a reader of text notices


class Listener(Protocol):
    """Who is told what Redis says about a job."""

    def has(self, job: ActiveJob) -> bool:
        """Whether it is still this worker's."""
        ...

    def published(self, job: ActiveJob) -> None:
        """Redis has more of it than before."""

    def repaired(self, job: ActiveJob) -> None:
        """Redis had another number of tokens; the difference is sent again."""

    def cancelled(self, job: ActiveJob) -> None:
        """Its producer wants it cancelled."""

    def fenced(self, job: ActiveJob) -> None:
        """It is another worker's now."""

    def unpublishable(self, job: ActiveJob, message: str) -> None:
        """Its reply cannot be written."""

    def buried(self, job: ActiveJob) -> None:
        """There is a dead letter of it, because its terminal event could not be written."""

    def ended(self, job: ActiveJob) -> None:
        """It is over: its terminal event is written, or it is buried."""


class Publisher:
    """One slot per job: whoever changes a job calls `changed`, and `run` writes what Redis lacks."""

    def __init__(self, queue: Queue, link: Link, listener: Listener) -> None:
        self._queue = queue
        self._link = link
        self._listener = listener
        self._waiting: dict[str, ActiveJob] = {}
        self._urgent: dict[str, ActiveJob] = {}
        self._changed = asyncio.Event()
        self._urge = asyncio.Event()
        self._flush_seconds = 0.0
        self._next_flush = 0.0

    def changed(self, job: ActiveJob) -> None:
        """The job has something that Redis lacks."""
        self._waiting[job.id] = job
        self._changed.set()
        if job.urgent:
            self._urgent[job.id] = job
            self._urge.set()

    def forget(self, job: ActiveJob) -> None:
        """Publish nothing more of this job."""
        self._waiting.pop(job.id, None)
        self._urgent.pop(job.id, None)

    async def run(self) -> None:
        """Flush until cancelled. While Redis is away jobs keep what they have."""
        while not cancelled():
            await self._changed.wait()
            await self._link.wait_up()
            await self._merge()
            await self._flush_some()

    async def flush(self) -> bool:
        """Write everything now, once (a last time before jobs are handed back); whether Redis took it."""
        return await self._try(self._take(self._waiting))

    async def _merge(self) -> None:
        """Let tokens gather until the next flush is due, unless a client waits for its first one."""
        pause = self._next_flush - time.monotonic()
        if pause > 0:
            try:
                async with asyncio.timeout(pause):
                    await self._urge.wait()
            except TimeoutError:
                pass

    async def _flush_some(self) -> None:
        due = time.monotonic() >= self._next_flush
        began = time.monotonic()
        if await self._try(self._take(self._waiting if due else self._urgent)) and due:
            self._flush_seconds = time.monotonic() - began
            self._next_flush = began + min(MERGE_SECONDS, MERGE_FACTOR * self._flush_seconds)

    def _take(self, source: dict[str, ActiveJob]) -> list[ActiveJob]:
        jobs = list(source.values())
        for job in jobs:
            self.forget(job)
        if not self._waiting:
            self._changed.clear()
        if not self._urgent:
            self._urge.clear()
        return jobs

    async def _try(self, jobs: list[ActiveJob]) -> bool:
        try:
            await self._append(jobs)
            await self._finish(jobs)
        except (RedisError, OSError) as error:
            self._link.lost(error)
            return False
        finally:  # also when we are cancelled: the last flush of a worker must not forget them
            for job in jobs:
                self._again(job)
        return True

    def _again(self, job: ActiveJob) -> None:
        """Whatever Redis still lacks of the job goes into the next flush."""
        if job.lacking and self._listener.has(job):
            self.changed(job)

    async def _append(self, jobs: Iterable[ActiveJob]) -> None:
        rows = [(job, row) for job in jobs for row in job.rows()]
        if not rows:
            return
        answers = await self._queue.append([row for _, row in rows])
        for (job, row), answer in zip(rows, answers, strict=True):
            self._appended(job, row, answer)

    def _appended(self, job: ActiveJob, row: AppendRow, answer: Answer) -> None:
        match answer.status:
            case "OK" | "CANCEL":
                job.written(row)
                self._listener.published(job)
                if answer.status == "CANCEL":
                    self._listener.cancelled(job)
            case _:
                self._refused(job, answer)

    async def _finish(self, jobs: Iterable[ActiveJob]) -> None:
        rows = [(job, row) for job in jobs if (row := job.finish_row())]
        if not rows:
            return
        answers = await self._queue.finish([row for _, row in rows])
        for (job, _), answer in zip(rows, answers, strict=True):
            if answer.status == "ERR":
                self._listener.buried(job)
            if answer.status in ("OK", "ERR"):
                self._listener.ended(job)
            else:
                self._refused(job, answer)

    def _refused(self, job: ActiveJob, answer: Answer) -> None:
        if answer.status == "GAP" and job.repair(answer):
            self._listener.repaired(job)
        elif answer.status == "ERR":
            self._listener.unpublishable(job, answer.text)
        else:
            self._listener.fenced(job)
