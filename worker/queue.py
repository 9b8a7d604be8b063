"""A worker's place at one queue: claim, publish, renew and hand back, under the fence (epoch, worker)."""

import random
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis

from gllm.keys import Keys
from gllm.protocol import VERSION
from worker import scripts
from worker.backlog import Backlog, by_priority
from worker.replay import PAGE, Replay
from worker.rows import Answer, AppendRow, FinishRow
from worker.scripts import ClaimedRow, LeaseRow, Note, ReleaseRow, Renewal

DEFAULT_SHARDS = 1
MAX_SHARDS = 256  # as in join.lua
MAX_ATTEMPTS = 4  # workers that may die with a job before it is given up
MAX_CLAIMS = 32  # backstop for what no charge catches, like a job that dies after each new token
MAX_WANT = 16  # jobs a claim: the next worker that asks should find some, too
REVERSED_EVERY = 8  # a claim in eight looks at low first and keeps nothing for suspects: so nothing starves for ever
SCAN_SECONDS = 1.0  # the scan walks all pending entries: not more often than this, however short the lease


class QueueMismatch(Exception):
    """The queue serves another model, tokenizer or protocol, or its meta is nonsense; the message says what to do."""


class Claimed(Struct, frozen=True, kw_only=True):
    """A job that this worker owns. `attempt`: workers that died with it so far; `claims`: how often it was handed out.

    `stream` is the short name (jobs:<priority>:<shard>). `published`: tokens that Redis says the client has.
    `cached_tokens` is None until the job was started somewhere. `claimed_ms` and `submitted_ms` are Redis' clock;
    `claimed` is the same moment on our monotonic one, in seconds.
    """

    id: str
    stream: str
    entry: str
    epoch: int
    attempt: int
    claims: int
    published: int
    body: bytes
    deadline_ms: int | None
    tenant: str | None
    affinity: str | None
    traceparent: str | None
    cached_tokens: int | None
    suspect: bool
    submitted_ms: int
    claimed_ms: int
    claimed: float
    taken_from: str


class ClaimReply(Struct, frozen=True, kw_only=True):
    """What a claim brought. `positions`: where to read on in each stream and in the bell, to hear of the next job.

    `more`: there may be more jobs at once. `kept`: new ones were left, so that the suspects that wait for a trial here
    have room after it. `waiting`: jobs that nobody holds, by priority. `groups_made`: lost groups.
    """

    jobs: list[Claimed]
    notes: list[Note]
    positions: dict[str, str]
    waiting: dict[str, Backlog]
    more: bool
    kept: bool
    groups_made: int


class RedisClock:
    """The server's clock between two answers: deadlines must not depend on the clock of this host."""

    def __init__(self) -> None:
        self._offset_ms: float | None = None

    def set(self, now_ms: int) -> None:
        self._offset_ms = now_ms - time.monotonic() * 1000

    def now_ms(self) -> int:
        """Unix milliseconds of the server, as far as known; 0 before the first answer."""
        return 0 if self._offset_ms is None else int(self._offset_ms + time.monotonic() * 1000)


class Queue:
    """One worker's view of one queue. `lease` in seconds. Errors of Redis pass through; see `worker.connection`.

    Where a method takes a `redis` it is a client with less patience than ours, for the loop that keeps the lease.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        worker: str,
        *,
        lease: float,
        limits: tuple[int, int] = (MAX_ATTEMPTS, MAX_CLAIMS),
        scan_seconds: float = SCAN_SECONDS,
    ) -> None:
        self.redis = redis
        self.keys = keys
        self.worker = worker
        self.lease = lease
        self.shards = DEFAULT_SHARDS
        self.clock = RedisClock()
        self._limits = limits
        self._scan_every = max(lease / 8, scan_seconds)
        self._next_scan = 0.0
        self._claims = 0
        self._answer_lost = False

    @property
    def lease_ms(self) -> int:
        return max(1, round(self.lease * 1000))

    @property
    def streams(self) -> list[str]:
        """Short names of the job streams in scan order."""
        return [name.removeprefix(self.keys.base) for name in self.keys.streams(self.shards)]

    async def join(self, model: str, redis: Redis | None = None) -> int:
        """Enter a queue that serves `model` (a digest), or found it; how many groups it made. Raises QueueMismatch.

        One that was flushed is founded anew with as many shards as it had: producers go on with the count they know.
        """
        meta = await scripts.join(redis or self.redis, self.keys.base, VERSION, self.shards, model)
        if meta.version != str(VERSION):
            raise QueueMismatch(f"queue {self.keys.queue!r} speaks protocol {meta.version!r}, this worker {VERSION}")
        if meta.model != model:
            raise QueueMismatch(
                f"queue {self.keys.queue!r} serves model and tokenizer {meta.model!r}, this worker has {model!r}: "
                f"use another --queue, or delete the key {self.keys.meta!r} when no other worker serves it"
            )
        if not (re.fullmatch("[0-9]{1,3}", meta.shards) and 1 <= int(meta.shards) <= MAX_SHARDS):
            raise QueueMismatch(
                f"queue {self.keys.queue!r} has {meta.shards!r} shards: set the field shards of {self.keys.meta!r} to "
                f"what it was, 1 by default, and {MAX_SHARDS} at most"
            )
        self.shards = int(meta.shards)
        return meta.groups_made

    async def claim(self, want: int, active: Iterable[str]) -> ClaimReply:
        """Take at most `want` jobs, none of them with an id in `active` (the jobs this worker has).

        Never cancel it in flight: what the script has handed out would be ours without our knowing. When its answer is
        lost all the same, the next claim takes those jobs up.
        """
        expired, own = time.monotonic() >= self._next_scan, self._answer_lost
        self._answer_lost = True
        self._claims += 1
        backwards = self._claims % REVERSED_EVERY == 0
        if expired:  # before the call: `scan_soon` may be said while it is in flight
            self._next_scan = time.monotonic() + self._scan_every * random.uniform(0.75, 1.0)
        reply = await scripts.claim(
            self.redis,
            self.keys.base,
            self.streams[::-1] if backwards else self.streams,
            self.worker,
            min(want, MAX_WANT),
            self.lease_ms,
            expired=expired,
            own=own,
            limits=self._limits,
            slots=None if backwards else want,
            active=active,
        )
        self._answer_lost = own and reply.more
        if reply.left or reply.kept:  # their clients wait in the middle of a reply: the next room is theirs, too
            self.scan_soon()
        self.clock.set(reply.now_ms)
        return self._reply(reply)

    def scan_soon(self) -> None:
        """Let the next claim look for expired entries whatever the time (a trial has ended, the next may begin)."""
        self._next_scan = 0.0

    async def append(self, rows: Sequence[AppendRow]) -> list[Answer]:
        """Publish events, one answer a row."""
        return await scripts.append(self.redis, self.keys.base, self.worker, rows)

    async def finish(self, rows: Sequence[FinishRow]) -> list[Answer]:
        """End jobs, one answer a row."""
        return await scripts.finish(self.redis, self.keys.base, self.worker, rows)

    async def renew(self, jobs: Iterable[Claimed], heartbeat: dict[str, str], redis: Redis | None = None) -> Renewal:
        """Renew leases, one answer a job, and write the heartbeat."""
        rows = [LeaseRow(job.id, job.epoch, job.stream, job.entry) for job in jobs]
        client = redis or self.redis
        reply = await scripts.renew(client, self.keys.base, self.streams, self.worker, self.lease_ms, heartbeat, rows)
        self.clock.set(reply.now_ms)
        return reply

    async def release(self, jobs: Iterable[Claimed], charged: frozenset[str] = frozenset()) -> list[Answer]:
        """Hand jobs back for anybody to claim at once; those in `charged` may be to blame. One answer a job."""
        rows = [ReleaseRow(job.id, job.epoch, job.stream, job.entry, int(job.id in charged)) for job in jobs]  # type: ignore[arg-type]
        return await scripts.release(self.redis, self.keys.base, self.worker, self.lease_ms, rows)

    async def leave(self) -> int:
        """Delete our consumers and heartbeat; how many consumers stay because something is pending for them."""
        return await scripts.leave(self.redis, self.keys.base, self.worker, self.streams)

    async def reap(self, redis: Redis | None = None) -> int:
        """Delete what workers killed long ago have left behind; how many consumers that were."""
        return await scripts.reap(redis or self.redis, self.keys.base, self.lease_ms, self.streams)

    async def published(self, job_id: str) -> Replay:
        """What `out:<id>` holds already."""
        found, start = Replay(), "-"
        while True:
            entries: Any = await self.redis.xrange(self.keys.out(job_id), min=start, count=PAGE)
            for _, fields in entries:
                found.add(fields.get(b"d", b""))
            if len(entries) < PAGE:
                return found
            start = "(" + entries[-1][0].decode()

    def _reply(self, reply: scripts.Claim) -> ClaimReply:
        positions = {self.keys.base + state.name: state.last_id for state in reply.streams}
        if reply.bell_id:
            positions[self.keys.bell] = reply.bell_id
        return ClaimReply(
            jobs=[_claimed(row, reply.now_ms) for row in reply.jobs],
            notes=reply.notes,
            positions=positions,
            waiting=by_priority((state.name, state.backlog) for state in reply.streams),
            more=reply.more,
            kept=reply.kept,
            groups_made=reply.groups_made,
        )


def _claimed(row: ClaimedRow, now_ms: int) -> Claimed:
    fields = row._asdict()
    attempt, published = fields.pop("attempts"), fields.pop("n")
    return Claimed(**fields, attempt=attempt, published=published, claimed_ms=now_ms, claimed=time.monotonic())
