"""Takes jobs out of Redis as the engine has room for them, and sleeps on the streams when there are none."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from worker import logs
from worker.admission import Admission
from worker.jobs import Jobs
from worker.link import Link
from worker.metrics import Metrics
from worker.queue import ClaimReply, Queue
from worker.scripts import Note

BLOCK_MS = 1000  # longest sleep: expired leases and delayed jobs make no sound
ENDED = ("cancelled", "deadline", "invalid", "unsupported", "too_large", "max_attempts", "internal")


class Claimer:
    """The claim loop. `stop` it, never cancel it: a claim in flight would hand out jobs that nobody knows of.

    `bell` is a client of its own whose timeout exceeds `BLOCK_MS`.
    """

    def __init__(
        self, queue: Queue, bell: Redis, link: Link, jobs: Jobs, admission: Admission, metrics: Metrics
    ) -> None:
        self._queue = queue
        self._bell = bell
        self._link = link
        self._jobs = jobs
        self._admission = admission
        self._metrics = metrics
        self._room = asyncio.Event()
        self._stopping = asyncio.Event()
        self._log = structlog.get_logger()
        self._acquitted = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._broken: set[str] = set()  # what the last claim said of broken keys: it is said again each second
        jobs.on_room = self._room.set
        jobs.on_acquitted = self._look_again

    def stop(self) -> None:
        """Claim nothing from now on; `run` returns once the claim in flight has come back."""
        self._stopping.set()

    async def run(self) -> None:
        """Claim until stopped."""
        try:
            while not self._stopping.is_set():
                await self._turn()
        finally:
            await self._stop_listening()

    async def _turn(self) -> None:
        await first_of(self._link.wait_up(), self._stopping)
        await first_of(self._wait_room(), self._stopping)
        if self._stopping.is_set():
            return
        reply = await self._claim()
        if reply and reply.kept:  # the streams would wake us at once, for what we do not want yet
            await first_of(asyncio.sleep(BLOCK_MS / 1000), self._stopping, self._acquitted)
        elif reply and not reply.more:
            await self._sleep(reply.positions)

    def _look_again(self) -> None:
        """A trial is over: the next suspect may be waiting for it."""
        self._queue.scan_soon()
        self._acquitted.set()

    async def _claim(self) -> ClaimReply | None:
        self._acquitted.clear()
        try:
            reply = await self._queue.claim(self._jobs.room, self._jobs.ids)
        except (RedisError, OSError) as error:
            self._link.lost(error)
            return None
        for claimed in reply.jobs:
            self._admission.begin(self._jobs.take(claimed))
        self._tell(reply)
        return reply

    async def _wait_room(self) -> None:
        while not self._jobs.room:
            self._room.clear()
            await self._room.wait()

    async def _sleep(self, positions: dict[str, str]) -> None:
        """Until something is added to a stream or to the bell, a trial ends, we are to stop, or a second has passed.

        A read that nothing has answered yet is kept for the next sleep: its positions are older then, so it can only
        end it too early. (Cancelling it would cost a connection each time.)
        """
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(positions), name="bell")
        await first_of(_done(self._listening), self._stopping, self._acquitted)
        if self._listening.done():
            self._listening = None

    async def _listen(self, positions: dict[str, str]) -> None:
        try:
            await self._bell.xread(positions, count=1, block=BLOCK_MS)  # type: ignore[arg-type]
        except (RedisError, OSError) as error:
            self._link.lost(error)

    async def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])  # it has an end even where redis-py swallows the cancellation

    def _tell(self, reply: ClaimReply) -> None:
        """Metrics and log lines of what the claim did beside handing out jobs."""
        self._metrics.queue.claim(reply.waiting)
        if reply.groups_made:
            self._metrics.recovery("group_lost", reply.groups_made)
            self._log.warning(logs.GROUP_LOST, groups=reply.groups_made)
        for note in reply.notes:
            self._tell_note(note)
        self._tell_broken({note.text for note in reply.notes if note.kind == "stream"})

    def _tell_broken(self, texts: set[str]) -> None:
        for text in sorted(texts - self._broken):
            self._log.error(logs.KEY_BROKEN, key=text)
        self._broken = texts

    def _tell_note(self, note: Note) -> None:
        match note.kind:
            case "duplicate" | "ended":
                self._metrics.recovery("duplicate")
            case "vanished":
                self._metrics.recovery("entry_lost")
                self._log.warning(logs.ENTRY_LOST, entry=note.text)
            case "dead_letter" | "unburied":
                self._tell_letter(note)
            case "unowned":
                self._metrics.recovery("unowned")
                self._log.warning(logs.ENTRY_UNOWNED, stream=note.text)
            case kind if kind in ENDED:
                self._metrics.jobs(kind)
                logs.of_job(note.id, note.epoch, note.claims).info(
                    logs.JOB_ENDED, outcome=kind, message=logs.without_value(note.text)
                )
            case "delayed" | "promoted":
                event = logs.JOB_DELAYED if note.kind == "delayed" else logs.JOB_PROMOTED
                logs.of_job(note.id, note.epoch, note.claims).debug(event)
            case _:
                pass  # keys that are not what they should be: `_tell_broken` knows which are new

    def _tell_letter(self, note: Note) -> None:
        """A dead letter, or one that could not be written."""
        written = note.kind == "dead_letter"
        reason, _, message = note.text.partition(": ") if written else ("unwritten", "", note.text)
        self._metrics.dead_letter(reason)
        logs.of_job(note.id, note.epoch, note.claims).warning(
            logs.DEAD_LETTER, reason=reason, message=logs.without_value(message), written=written
        )


async def first_of(waiting: Coroutine[Any, Any, None], *events: asyncio.Event) -> None:
    """Wait for something that may be cancelled at any time, until it is done or one of the events is set."""
    tasks = [asyncio.ensure_future(waiting), *(asyncio.ensure_future(event.wait()) for event in events)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]


async def _done(task: "asyncio.Task[None]") -> None:
    await asyncio.wait([task])
