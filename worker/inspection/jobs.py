"""The first jobs of a queue: those that somebody holds, then those that wait, then the delayed ones."""

from typing import Any, cast

from msgspec import Struct
from redis import Redis

from gllm.keys import GROUP, Keys
from worker.inspection.records import JobList, JobRow, JobState, Record, Survey
from worker.inspection.scripts import Peeked, answers, entry_ms, peek, text

RELEASED = "-released"
RECORD_FIELDS = ("state", "entry", "worker", "epoch", "attempts", "claims", "n", "cached_tokens")
_ORDER: list[JobState] = ["running", "orphaned", "released", "waiting", "duplicate"]
LABELS = ("tenant", "affinity", "deadline", "not_before", "traceparent", "v")


class Held(Struct, frozen=True):
    """A pending entry of a stream, and whose it is."""

    stream: str
    entry: str
    consumer: str
    idle_ms: int


class Entry(Struct, frozen=True):
    """An entry of a job stream, and who holds it."""

    item: Peeked
    stream: str
    held: Held | None

    @property
    def id(self) -> str:
        return self.item.fields.get("id", "")

    @property
    def here(self) -> str:
        """As a job's record writes it."""
        return f"{self.stream}|{self.item.entry}"

    @property
    def consumer(self) -> str | None:
        return self.held and self.held.consumer


def list_jobs(redis: Redis, keys: Keys, seen: Survey, alive: frozenset[str], limit: int) -> JobList:
    """At most `limit` jobs, in the order in which they have run, will run, or are due."""
    rows = _stream_rows(redis, keys, seen, alive, limit)
    rows.sort(key=lambda row: _ORDER.index(row.state))
    rows += _delayed_rows(redis, keys, seen, limit - len(rows))
    pending = [(consumer, count) for stream in seen.streams for consumer, count in stream.held.items()]
    released = sum(count for consumer, count in pending if consumer == RELEASED)
    return JobList(
        jobs=rows,
        held=sum(count for _, count in pending) - released,
        orphaned=sum(count for consumer, count in pending if consumer not in alive and consumer != RELEASED),
        released=released,
        waiting=max(0, sum(stream.waiting for stream in seen.streams) - released),
        delayed=seen.delayed,
    )


def entries_held(redis: Redis, keys: Keys, seen: Survey, limit: int) -> list[Entry]:
    """The first entries that are pending for somebody, in scan order; without those that were deleted meanwhile."""
    held = _held(redis, keys, seen, limit)
    found, _ = peek(redis, keys, limit, [(one.stream, one.entry, one.entry) for one in held])
    return [Entry(item, held[item.range].stream, held[item.range]) for item in found]


def records(redis: Redis, keys: Keys, ids: list[str]) -> list[tuple[Record, bool]]:
    """For each id its record, empty where there is none, and whether its producer wants it cancelled."""
    pipeline = redis.pipeline(transaction=False)
    for job_id in ids:
        pipeline.hmget(keys.job(job_id), list(RECORD_FIELDS))
        pipeline.exists(keys.cancel(job_id))
    got = answers(pipeline) if ids else []
    return [(record_of(fields), wish == 1) for fields, wish in zip(got[::2], got[1::2], strict=True)]


def record_of(fields: Any, life_ms: int | None = None) -> Record:
    """A record out of the answer for RECORD_FIELDS; what is no number counts as none."""
    values = [None] * len(RECORD_FIELDS) if isinstance(fields, Exception) else fields
    state, entry, worker, *numbers = [None if value is None else text(value) for value in values]
    epoch, attempts, claims, tokens, cached = [int(value) if value and value.isdecimal() else None for value in numbers]
    return Record(
        state=state,
        entry=entry,
        worker=worker,
        epoch=epoch or 0,
        attempts=attempts or 0,
        claims=claims or 0,
        tokens=tokens or 0,
        cached_tokens=cached,
        life_ms=life_ms,
    )


NO_RECORD = record_of([None] * len(RECORD_FIELDS))


def state_of(record: Record, here: str, consumer: str | None, alive: frozenset[str]) -> JobState:
    """What is the matter with an entry: `here` is stream|entry, `consumer` who it is pending for."""
    if record.entry not in (None, here) or record.state in ("ended", "delayed"):
        return "duplicate"
    if consumer is None:
        return "waiting"
    if consumer == RELEASED:
        return "released"
    return "running" if consumer in alive else "orphaned"


def labels_of(fields: dict[str, str]) -> dict[str, str]:
    """What an entry says beside id and body."""
    return {name: fields[name] for name in LABELS if name in fields}


def _held(redis: Redis, keys: Keys, seen: Survey, limit: int) -> list[Held]:
    """The first pending entries of all streams, in scan order."""
    streams = [stream.name for stream in seen.streams if stream.held]
    pipeline = redis.pipeline(transaction=False)
    for name in streams:
        pipeline.xpending_range(keys.base + name, GROUP, "-", "+", limit)
    got = answers(pipeline) if streams else []
    found = [
        Held(name, one["message_id"].decode(), text(one["consumer"]), one["time_since_delivered"])
        for name, answer in zip(streams, got, strict=True)
        if not isinstance(answer, Exception)
        for one in answer
    ]
    return found[:limit]


def _stream_rows(redis: Redis, keys: Keys, seen: Survey, alive: frozenset[str], limit: int) -> list[JobRow]:
    found = entries_held(redis, keys, seen, limit)
    found += _entries_new(redis, keys, seen, limit - len(found))
    known = records(redis, keys, [entry.id for entry in found])
    return [
        _row(entry, state_of(record, entry.here, entry.consumer, alive), record, wish, seen.now_ms)
        for entry, (record, wish) in zip(found, known, strict=True)
    ]


def _entries_new(redis: Redis, keys: Keys, seen: Survey, limit: int) -> list[Entry]:
    """The first entries that were never delivered, in scan order."""
    ranges = [(stream.name, f"({stream.last_id}", "+") for stream in seen.streams if stream.entries]
    found, _ = peek(redis, keys, limit, ranges)
    return [Entry(item, ranges[item.range][0], None) for item in found]


def _row(entry: Entry, state: JobState, record: Record, wish: bool, now_ms: int) -> JobRow:
    mine = NO_RECORD if state == "duplicate" else record
    return JobRow(
        id=entry.id,
        state=state,
        priority=priority_of(entry.stream),
        stream=entry.stream,
        entry=entry.item.entry,
        age_ms=max(0, now_ms - entry.item.ms),
        tokens=mine.tokens,
        attempts=mine.attempts,
        claims=mine.claims,
        cancelling=wish,
        worker=None if entry.consumer == RELEASED else entry.consumer,
        idle_ms=entry.held and entry.held.idle_ms,
        body_bytes=entry.item.body_bytes,
        labels=labels_of(entry.item.fields),
    )


def _delayed_rows(redis: Redis, keys: Keys, seen: Survey, limit: int) -> list[JobRow]:
    if limit < 1 or not seen.delayed:
        return []
    due = cast(list[tuple[bytes, float]], redis.zrange(keys.delayed, 0, limit - 1, withscores=True))
    ids = [text(job_id) for job_id, _ in due]
    known = records(redis, keys, ids)
    return [
        _delayed_row(job_id, int(due_ms), record, wish, seen.now_ms)
        for job_id, (_, due_ms), (record, wish) in zip(ids, due, known, strict=True)
    ]


def _delayed_row(job_id: str, due_ms: int, record: Record, wish: bool, now_ms: int) -> JobRow:
    stream, _, entry = (record.entry or "").partition("|")
    return JobRow(
        id=job_id,
        state="delayed",
        priority=priority_of(stream),
        stream=stream,
        entry=entry,
        age_ms=max(0, now_ms - entry_ms(entry)) if entry else 0,
        tokens=record.tokens,
        attempts=record.attempts,
        claims=record.claims,
        cancelling=wish,
        due_in_ms=due_ms - now_ms,
    )


def priority_of(stream: str) -> str:
    """The priority in a stream's short name; empty for what is none."""
    parts = stream.split(":")
    return parts[1] if len(parts) == 3 else ""
