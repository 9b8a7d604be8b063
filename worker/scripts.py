"""The Lua scripts of worker/lua and one typed function for each. What they do stands in the headers of the .lua files.

Each call is EVALSHA, and EVAL when the server does not know the script (restart, SCRIPT FLUSH): never in a pipeline.
"""

from collections.abc import Awaitable, Iterable, Sequence
from hashlib import sha1
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from worker.backlog import Backlog, by_priority, submitted_ms
from worker.rows import Answer, AppendRow, FinishRow, answer_of, answers, appended, wire

FOLDER = Path(__file__).parent / "lua"


class Script:
    """A script from one or more files of the folder, with the shared text before them."""

    def __init__(self, *names: str) -> None:
        self.text = "".join((FOLDER / f"{name}.lua").read_text("utf-8") for name in ("common", *names))
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, redis: Redis, keys: Sequence[str], args: Iterable[Any]) -> Any:
        arguments = (len(keys), *keys, *args)
        try:
            return await cast(Awaitable[Any], redis.evalsha(self.sha, *arguments))
        except NoScriptError:
            return await cast(Awaitable[Any], redis.eval(self.text, *arguments))


_append = Script("append")
_claim = Script("groups", "endings", "delayed", "claim")
_finish = Script("finish")
_join = Script("join")
_leave = Script("leave")
_reap = Script("reap")
_release = Script("release")
_renew = Script("groups", "renew")
_requeue = Script("requeue")


class LeaseRow(NamedTuple):
    """A job to renew."""

    id: str
    epoch: int
    stream: str
    entry: str


class ReleaseRow(NamedTuple):
    """A job to hand back; `charged` when it may be to blame for the end of its worker."""

    id: str
    epoch: int
    stream: str
    entry: str
    charged: Literal[0, 1]


class Renewal(NamedTuple):
    """`now_ms` is the server's clock; `known` is False when the queue's meta is lost (a flush).

    `waiting`: jobs that nobody holds, by priority.
    """

    now_ms: int
    known: bool
    answers: list[Answer]
    waiting: dict[str, Backlog]


class Meta(NamedTuple):
    """What a queue says of itself, whatever that is. `groups_made`: consumer groups that were missing."""

    version: str
    shards: str
    model: str
    groups_made: int


class StreamState(NamedTuple):
    """A job stream after a claim: read on from `last_id`."""

    name: str
    last_id: str
    backlog: Backlog


class Note(NamedTuple):
    """Something that a claim did beside handing out jobs; `epoch` and `claims` are 0 where there is no record."""

    kind: str
    id: str
    text: str
    epoch: int
    claims: int


class ClaimedRow(NamedTuple):
    """A job as the claim script hands it out. Labels that are no UTF-8 have lone surrogates, each its own."""

    id: str
    stream: str
    entry: str
    epoch: int
    attempts: int
    claims: int
    n: int
    cached_tokens: int | None
    suspect: bool
    submitted_ms: int
    taken_from: str
    body: bytes
    deadline_ms: int | None
    tenant: str | None
    affinity: str | None
    traceparent: str | None


class Claim(NamedTuple):
    """What a claim brought; the fields are those of claim.lua."""

    now_ms: int
    more: bool
    suspects: int
    groups_made: int
    bell_id: str
    streams: list[StreamState]
    jobs: list[ClaimedRow]
    notes: list[Note]
    left: bool
    kept: bool


async def claim(
    redis: Redis,
    base: str,
    streams: Sequence[str],
    worker: str,
    want: int,
    lease_ms: int,
    *,
    expired: bool,
    own: bool,
    limits: tuple[int, int],
    slots: int | None,
    active: Iterable[str],
) -> Claim:
    """Hand out at most `want` jobs. `limits`: charged attempts and claims; `streams`: short names in scan order.

    `slots`: free ones of the worker, to leave some of them for jobs that had begun; None: leave none.
    """
    args = (worker, want, lease_ms, int(expired), int(own), *limits, slots or "", *active)
    reply = await _claim(redis, _keys(base, streams), args)
    now_ms, more, suspects, groups, bell, states, jobs, notes, left, kept = reply
    return Claim(
        now_ms=now_ms,
        more=bool(more),
        suspects=suspects,
        groups_made=groups,
        bell_id=bell.decode(),
        streams=[StreamState(name.decode(), last.decode(), Backlog(*counts)) for name, last, *counts in states],
        jobs=[_claimed(row) for row in jobs],
        notes=[Note(*(text.decode(errors="replace") for text in note[:3]), *note[3:]) for note in notes],
        left=bool(left),
        kept=bool(kept),
    )


def _claimed(row: list[Any]) -> ClaimedRow:
    id_, stream, entry, epoch, attempts, claims, n, cached, suspect, submitted, taken, body, *rest = row
    deadline, tenant, affinity, traceparent = [value.decode(errors="surrogateescape") or None for value in rest]
    return ClaimedRow(
        id=id_.decode(),
        stream=stream.decode(),
        entry=entry.decode(),
        epoch=epoch,
        attempts=attempts,
        claims=claims,
        n=n,
        cached_tokens=int(cached) if cached else None,
        suspect=bool(suspect),
        submitted_ms=submitted,
        taken_from=taken.decode(errors="replace"),
        body=body,
        deadline_ms=int(deadline) if deadline else None,
        tenant=tenant,
        affinity=affinity,
        traceparent=traceparent,
    )


async def append(redis: Redis, base: str, worker: str, rows: Sequence[AppendRow]) -> list[Answer]:
    """Publish events; OK, CANCEL, FENCED, GAP or ERR for each row."""
    return appended(rows, await _append(redis, [base], (worker, wire(rows))))


async def finish(redis: Redis, base: str, worker: str, rows: Sequence[FinishRow]) -> list[Answer]:
    """End jobs; OK, FENCED, GAP or ERR for each row."""
    return answers(await _finish(redis, [base], (worker, *_flat(rows))))


async def renew(
    redis: Redis,
    base: str,
    streams: Sequence[str],
    worker: str,
    lease_ms: int,
    heartbeat: dict[str, str],
    rows: Sequence[LeaseRow],
) -> Renewal:
    """Renew leases and write the heartbeat; OK, CANCEL, FENCED or ERR for each row."""
    args = (worker, lease_ms, len(heartbeat), *_flat(heartbeat.items()), *_flat(rows))
    now_ms, known, statuses, counts = await _renew(redis, _keys(base, streams), args)
    streams = [counts[i : i + 4] for i in range(0, len(counts), 4)]
    waiting = [(name.decode(), Backlog(count, new, submitted_ms(oldest))) for name, count, new, oldest in streams]
    return Renewal(now_ms, bool(known), [answer_of(status) for status in statuses], by_priority(waiting))


async def release(redis: Redis, base: str, worker: str, lease_ms: int, rows: Sequence[ReleaseRow]) -> list[Answer]:
    """Hand jobs back; OK, FENCED, GONE or ERR for each row."""
    return [answer_of(status) for status in await _release(redis, [base], (worker, lease_ms, *_flat(rows)))]


async def join(redis: Redis, base: str, version: int, shards: int, model: str) -> Meta:
    """Write or read the queue's meta, and make missing groups when version and model are ours."""
    *texts, made = await _join(redis, [base], (version, shards, model))
    found_version, found_shards, found_model = (text.decode(errors="replace") for text in texts)
    return Meta(found_version, found_shards, found_model, made)


async def leave(redis: Redis, base: str, worker: str, streams: Sequence[str]) -> int:
    """Delete the worker's heartbeat and its consumers; how many were kept because something is pending for them."""
    return await _leave(redis, [base], (worker, *streams))


async def reap(redis: Redis, base: str, lease_ms: int, streams: Sequence[str]) -> int:
    """Delete the consumers of workers that died long ago and hold nothing; how many they were."""
    return await _reap(redis, [base], (lease_ms, *streams))


async def requeue(redis: Redis, base: str, letter: str) -> str:
    """Add a dead letter's job again. Raises ResponseError GONE, NOBODY or LIVE."""
    return (await _requeue(redis, [base], (letter,))).decode()


def _keys(base: str, streams: Iterable[str]) -> list[str]:
    return [base, *(base + stream for stream in streams)]


def _flat(rows: Iterable[Iterable[Any]]) -> list[Any]:
    return [value for row in rows for value in row]
