"""Everything about one id. A job that no worker has looked at yet has no record: it is searched for among those that
wait, and only the first of them, so that asking for an unknown id never walks a million entries.
"""

from collections.abc import Iterable
from typing import Any, cast

from msgspec import Struct
from redis import Redis

from gllm.keys import GROUP, Keys
from worker.inspection.jobs import (
    LABELS,
    NO_RECORD,
    RECORD_FIELDS,
    RELEASED,
    entries_held,
    labels_of,
    record_of,
    state_of,
)
from worker.inspection.letters import letters_about
from worker.inspection.records import Holder, JobState, JobView, Place, Record, ReplyView, StreamView, Survey
from worker.inspection.replies import read_reply
from worker.inspection.scripts import Peeked, answers, entry_ms, pages, peek, text

MAX_LOOKED = 1000  # waiting entries of each stream
NO_KEY = -2  # PTTL's answer
_PARKED = "entry:"  # before the names of what a delayed job's record keeps of its entry


class Kept(Struct, frozen=True, kw_only=True):
    """What lies in the keys of one id. `record` is None without a hash; `reply`: whether there is one."""

    record: Record | None
    labels: dict[str, str]
    parked_bytes: int | None
    cancelling: bool
    due_ms: int | None
    reply: bool
    reply_life_ms: int | None
    problems: list[str]


class Spot(Struct, frozen=True, kw_only=True):
    """Where its entry is: `ahead` waiting entries before it in its stream, None when that is too far to count."""

    stream: str
    entry: str
    item: Peeked | None
    ahead: int | None
    holder: Holder | None


def look_up(redis: Redis, keys: Keys, seen: Survey, alive: frozenset[str], job_id: str) -> JobView | None:
    """What Redis knows about an id, or None."""
    kept = _kept(redis, keys, job_id)
    spot = _spot(redis, keys, seen, alive, job_id, kept.record)
    reply = read_reply(redis, keys, job_id, kept.reply_life_ms) if kept.reply else None
    letters = letters_about(redis, keys, job_id)
    if kept.record is None and spot is None and reply is None and not letters and not kept.problems:
        return None
    stream, entry = _entry_of(spot, kept.record)
    item = spot and spot.item
    return JobView(
        id=job_id,
        now_ms=seen.now_ms,
        state=_state(kept.record, spot, reply, alive),
        stream=stream,
        entry=entry,
        age_ms=max(0, seen.now_ms - entry_ms(entry)) if entry else None,
        record=kept.record,
        holder=spot and spot.holder,
        place=_place(seen, spot),
        due_in_ms=None if kept.due_ms is None else kept.due_ms - seen.now_ms,
        cancelling=kept.cancelling,
        body_bytes=item.body_bytes if item else kept.parked_bytes,
        labels=labels_of(item.fields) if item else kept.labels,
        reply=reply,
        letters=letters,
        problems=kept.problems,
    )


def _kept(redis: Redis, keys: Keys, job_id: str) -> Kept:
    job, out = keys.job(job_id), keys.out(job_id)
    pipeline = redis.pipeline(transaction=False)
    pipeline.hmget(job, list(RECORD_FIELDS))
    pipeline.hmget(job, [_PARKED + name for name in LABELS])
    pipeline.hstrlen(job, _PARKED + "body")
    pipeline.pttl(job)
    pipeline.exists(keys.cancel(job_id))
    pipeline.zscore(keys.delayed, job_id)
    pipeline.pttl(out)
    pipeline.xlen(out)
    got = answers(pipeline)
    broken = [answer for answer in got if isinstance(answer, Exception)]
    fields, parked, size, life, wish, due, reply_life, entries = [
        None if isinstance(answer, Exception) else answer for answer in got
    ]
    return Kept(
        record=record_of(fields, _life(life)) if fields and any(value is not None for value in fields) else None,
        labels={name: text(value) for name, value in zip(LABELS, parked or (), strict=False) if value},
        parked_bytes=size or None,
        cancelling=wish == 1,
        due_ms=None if due is None else int(due),
        reply=entries is not None and reply_life != NO_KEY,
        reply_life_ms=_life(reply_life),
        problems=sorted({str(error) for error in broken}),
    )


def _life(pttl: int | None) -> int | None:
    return pttl if pttl is not None and pttl >= 0 else None


def _spot(
    redis: Redis, keys: Keys, seen: Survey, alive: frozenset[str], job_id: str, record: Record | None
) -> Spot | None:
    """Where the id's entry is, as its record says, else where it is found."""
    if record is None or not record.entry:
        return _searched(redis, keys, seen, alive, job_id)
    name, _, entry = record.entry.partition("|")
    stream = next((stream for stream in seen.streams if stream.name == name), None)
    if stream is None or record.state in ("ended", "delayed"):
        return None
    found, _ = peek(redis, keys, 1, [(name, entry, entry)])
    holder = _holder(redis, keys, stream, entry, alive)
    ahead = _ahead(redis, keys, stream, entry, holder) if found else None
    return Spot(stream=name, entry=entry, item=found[0] if found else None, ahead=ahead, holder=holder)


def _searched(redis: Redis, keys: Keys, seen: Survey, alive: frozenset[str], job_id: str) -> Spot | None:
    for one in entries_held(redis, keys, seen, MAX_LOOKED):
        if one.id == job_id and one.held:
            holder = Holder(consumer=one.held.consumer, idle_ms=one.held.idle_ms, alive=one.held.consumer in alive)
            return Spot(stream=one.stream, entry=one.item.entry, item=one.item, ahead=None, holder=holder)
    for stream in seen.streams:
        released = stream.held.get(RELEASED, 0)
        for ahead, item in enumerate(_waiting(redis, keys, stream), start=released):
            if item.fields.get("id") == job_id:
                return Spot(stream=stream.name, entry=item.entry, item=item, ahead=ahead, holder=None)
    return None


def _waiting(redis: Redis, keys: Keys, stream: StreamView) -> Iterable[Peeked]:
    """The first entries that were never delivered."""
    return pages(redis, keys, stream.name, f"({stream.last_id}", "+", MAX_LOOKED) if stream.entries else ()


def _holder(redis: Redis, keys: Keys, stream: StreamView, entry: str, alive: frozenset[str]) -> Holder | None:
    if not stream.held:
        return None
    for one in cast(list[dict[str, Any]], redis.xpending_range(keys.base + stream.name, GROUP, entry, entry, 1)):
        name = text(one["consumer"])
        return Holder(consumer=name, idle_ms=one["time_since_delivered"], alive=name in alive)
    return None


def _ahead(redis: Redis, keys: Keys, stream: StreamView, entry: str, holder: Holder | None) -> int | None:
    """How many entries of the stream get their turn before this one; None for one that has had it, or is too far."""
    released = stream.held.get(RELEASED, 0)
    if holder is None:
        entries = (item.entry for item in _waiting(redis, keys, stream))
        return next((released + before for before, found in enumerate(entries) if found == entry), None)
    if holder.consumer != RELEASED:
        return None
    return len(redis.xpending_range(keys.base + stream.name, GROUP, "-", f"({entry}", MAX_LOOKED, RELEASED))  # type: ignore[arg-type]


def _entry_of(spot: Spot | None, record: Record | None) -> tuple[str | None, str | None]:
    if spot:
        return spot.stream, spot.entry
    stream, _, entry = ((record and record.entry) or "").partition("|")
    return stream or None, entry or None


def _place(seen: Survey, spot: Spot | None) -> Place | None:
    if spot is None or (spot.holder and spot.holder.consumer != RELEASED):
        return None
    waiting = next(stream.waiting for stream in seen.streams if stream.name == spot.stream)
    return Place(stream=spot.stream, ahead=spot.ahead, waiting=waiting)


def _state(record: Record | None, spot: Spot | None, reply: ReplyView | None, alive: frozenset[str]) -> JobState:
    known = record.state if record else None
    if known == "ended" or (reply and reply.end):
        return "ended"
    if known == "delayed":
        return "delayed"
    if spot and (spot.holder or known != "running"):
        return state_of(record or NO_RECORD, f"{spot.stream}|{spot.entry}", spot.holder and spot.holder.consumer, alive)
    if record and known == "running":
        return "running" if record.worker in alive else "orphaned"
    return "unknown"
