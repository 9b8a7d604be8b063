"""From a claimed job to a request in the engine: read what was published, decode, tokenise in a thread, replay."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, cast

from redis.exceptions import RedisError

from gllm.protocol import InvalidJob, Job
from gllm.validate import decode_job, shown
from worker import logs
from worker.active import ActiveJob
from worker.connection import cancelled
from worker.intake import Intake, JobRejected
from worker.jobs import Jobs
from worker.link import Link
from worker.queue import Claimed, Queue
from worker.replay import Replay
from worker.text import Ending, ReplyText

Rejection = Literal["invalid", "unsupported", "too_large"]

THREADS = 2  # prompts tokenised at the same time: more would only take the engine's cores


class Prepared:
    """What the thread makes of a body."""

    def __init__(self, intake: Intake, claimed: Claimed, replay: Replay) -> None:
        _check_tenant(claimed.tenant)
        self.job: Job = decode_job(claimed.body, intake.defaults)
        self.prompt_ids: list[int] = intake.prepare(self.job, claimed.submitted_ms)
        self.reply: ReplyText = intake.reply_text(self.job, self.prompt_ids)
        self.ending: Ending | None = self.reply.push(replay.ids)


def _check_tenant(tenant: str | None) -> None:
    """Raises InvalidJob for one that is no text: read leniently, two tenants could become one and share a cache."""
    try:
        (tenant or "").encode()
    except UnicodeEncodeError:
        raise InvalidJob(f"tenant: UTF-8 expected, got {shown(tenant)}") from None


class Admission:
    """Prepares jobs one by one, at most `THREADS` at a time; a suspect of killing workers is prepared alone."""

    def __init__(self, queue: Queue, link: Link, jobs: Jobs, intake: Intake) -> None:
        self._queue = queue
        self._link = link
        self._jobs = jobs
        self._intake = intake
        self._slots = asyncio.Semaphore(THREADS)
        self._alone = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, job: ActiveJob) -> None:
        """Prepare a job in the background; it ends or starts by itself."""
        task = asyncio.create_task(self._admit(job), name=f"admit {job.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up on what is still being prepared (the jobs stay as they are)."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _admit(self, job: ActiveJob) -> None:
        try:
            replay = await self._published(job)
            async with self._slot(job.claimed.suspect):
                prepared = await asyncio.to_thread(Prepared, self._intake, job.claimed, replay)
        except InvalidJob as error:
            self._jobs.fail(job, "invalid", str(error))
        except JobRejected as error:
            self._jobs.fail(job, cast(Rejection, error.code), error.message)
        except Exception as error:  # a fault of ours, or of a library, in one job: its neighbours must not notice
            job.log.error(logs.JOB_FAILED, error=type(error).__name__, where=logs.where(error))
            self._jobs.fail(job, "internal", f"{type(error).__name__} while the job was prepared")
        else:
            self._start(job, prepared, replay)

    def _start(self, job: ActiveJob, prepared: Prepared, replay: Replay) -> None:
        if not self._jobs.owns(job):
            return  # cancelled or taken from us meanwhile
        job.chat = prepared.job.messages is not None
        job.prepared(prepared.reply, len(prepared.prompt_ids), replay)
        if prepared.ending is not None:  # the published tokens are the whole reply already
            self._jobs.end(job, *prepared.ending)
            return
        claimed = job.claimed
        output, tenant, alone = prepared.reply.ids, claimed.tenant, claimed.suspect
        self._jobs.start(job, self._intake.request(job.id, prepared.job, prepared.prompt_ids, output, tenant, alone))

    async def _published(self, job: ActiveJob) -> Replay:
        """What the client has already; nothing to ask for where nobody had the job before."""
        if job.claimed.claims == 1 and not job.claimed.published:
            return Replay()
        while not cancelled():
            await self._link.wait_up()
            try:
                return await self._queue.published(job.id)
            except (RedisError, OSError) as error:
                self._link.lost(error)
        raise asyncio.CancelledError

    @asynccontextmanager
    async def _slot(self, suspect: bool) -> AsyncIterator[None]:
        """A turn at the threads; a suspect takes all of them, so that only it can be to blame."""
        async with self._alone:
            for _ in range(THREADS if suspect else 1):
                await self._slots.acquire()
        try:
            yield
        finally:
            for _ in range(THREADS if suspect else 1):
                self._slots.release()
