"""The one door to what can be known of a queue."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from redis import Redis
from redis.exceptions import NoPermissionError

from gllm.keys import GROUP, PRIORITIES, Keys
from worker.inspection import letters, scripts
from worker.inspection.jobs import RELEASED, list_jobs
from worker.inspection.one_job import look_up
from worker.inspection.records import (
    EngineView,
    JobList,
    JobView,
    Letter,
    PriorityView,
    QueueView,
    StreamView,
    Survey,
    WorkerRow,
)
from worker.inspection.scripts import entry_ms, text

DEFAULT_LEASE_MS = 15_000
MAX_WORKERS = 1000  # heartbeats that are read, the newest first
NOT_MADE = ("there is no such stream", f"it has no group {GROUP}")  # words of survey.lua
_WORKER_FIELDS = ("host", "pid", "device", "capacity", "trial", "numerics", "version", "lease", "since")
_ENGINE_FIELDS = EngineView.__struct_fields__


class Inspector:
    """Reads one queue, and deals with its dead letters. Each method is a few round trips; errors of Redis pass through.

    A `survey` may be handed on to the other methods, so that all they say is of the same moment.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis = redis
        self.keys = keys

    def knock(self) -> None:
        """A round trip. Raises redis-py's error when the server is not there; PING itself may be forbidden."""
        with contextlib.suppress(NoPermissionError):
            self.redis.ping()

    def survey(self) -> Survey:
        """All streams and counts, at one moment."""
        now, meta, delayed, due, dead, workers, streams = scripts.survey(self.redis, self.keys)
        version, shards, model, quiet = map(text, meta)
        return Survey(
            now_ms=now,
            version=version,
            shards=shards,
            model=model,
            quiet_until_ms=_number(quiet) or 0,
            delayed=delayed,
            due_ms=int(float(due)) if due else None,
            dead=dead,
            workers=workers,
            streams=[_stream(row) for row in streams],
        )

    def queue(self, survey: Survey | None = None, workers: list[WorkerRow] | None = None) -> QueueView:
        """Depth, lag and oldest age per priority."""
        seen = survey or self.survey()
        states = [worker.state for worker in (self.workers(seen) if workers is None else workers)]
        return QueueView(
            queue=self.keys.queue,
            priorities=[_priority(name, seen) for name in PRIORITIES],
            delayed=seen.delayed,
            due_in_ms=None if seen.due_ms is None else seen.due_ms - seen.now_ms,
            dead=seen.dead,
            workers_alive=states.count("alive"),
            workers_silent=states.count("silent"),
            problems=_problems(seen),
        )

    def workers(self, survey: Survey | None = None) -> list[WorkerRow]:
        """Workers with a heartbeat, the longest alive first, then consumers without one that hold entries."""
        seen = survey or self.survey()
        held = _held(seen)
        beats = self._heartbeats() if seen.workers else {}
        pipeline = self.redis.pipeline(transaction=False)
        for name in beats:
            pipeline.hmget(self.keys.worker(name), [*_WORKER_FIELDS, *_ENGINE_FIELDS])
        answers = scripts.answers(pipeline) if beats else []
        rows = [
            _worker(name, beats[name], answer, held.pop(name, 0), seen.now_ms)
            for name, answer in zip(beats, answers, strict=True)
        ]
        rows.sort(key=lambda row: (row.state, -(row.up_ms or 0), row.name))
        return rows + [WorkerRow(name=name, state="gone", jobs=count) for name, count in sorted(held.items()) if count]

    def jobs(self, limit: int, survey: Survey | None = None, workers: list[WorkerRow] | None = None) -> JobList:
        """The first `limit` unfinished jobs: those that run, then those that wait, in the order of their turn."""
        seen = survey or self.survey()
        return list_jobs(self.redis, self.keys, seen, self._alive(seen, workers), limit)

    def job(self, job_id: str, survey: Survey | None = None) -> JobView | None:
        """Everything about one id; None when Redis knows nothing of it, as far as was looked (see `one_job`)."""
        seen = survey or self.survey()
        return look_up(self.redis, self.keys, seen, self._alive(seen, None), job_id)

    def letters(self) -> Iterator[Letter]:
        """Dead letters, the newest first, read page by page."""
        return letters.every(self.redis, self.keys)

    def letters_named(self, name: str) -> list[Letter]:
        """The letters that a person means: the one with this entry id, else those of this job, the newest first."""
        return letters.named(self.redis, self.keys, name)

    def body_of(self, letter: Letter) -> bytes | None:
        """The body of the job, where the letter keeps it."""
        return letters.body_of(self.redis, self.keys, letter)

    def requeue(self, letter: Letter) -> str:
        """Adds the letter's job again; the new entry's id. Raises ResponseError: the words of requeue.lua."""
        return scripts.requeue(self.redis, self.keys, letter.entry)

    def purge(self, entries: list[str]) -> int:
        """Deletes letters by their entry ids; how many there were."""
        return letters.purge(self.redis, self.keys, entries)

    def _heartbeats(self) -> dict[str, int]:
        """Milliseconds of the newest heartbeats, by worker."""
        newest = self.redis.zrange(self.keys.workers, 0, MAX_WORKERS - 1, desc=True, withscores=True)
        return {text(name): int(score) for name, score in cast(Any, newest)}

    def _alive(self, seen: Survey, workers: list[WorkerRow] | None) -> frozenset[str]:
        rows = self.workers(seen) if workers is None else workers
        return frozenset(row.name for row in rows if row.state == "alive")


def _stream(row: list[Any]) -> StreamView:
    name, entries, waiting, lag, last, oldest, problem, *held = row
    return StreamView(
        name=text(name),
        entries=entries,
        waiting=max(0, waiting),
        lag=None if lag < 0 else lag,
        last_id=text(last),
        oldest_ms=entry_ms(text(oldest)) if oldest else None,
        problem=text(problem) or None,
        held={text(name): count for name, count in zip(held[::2], held[1::2], strict=True)},
    )


def _problems(seen: Survey) -> list[str]:
    """What is wrong with streams; in a queue that no worker has joined, none has a group yet."""
    new = not seen.version
    missing = [stream for stream in seen.streams if stream.problem in NOT_MADE]
    broken = [stream for stream in seen.streams if stream.problem and not (new and stream in missing)]
    first = ["no worker has joined this queue yet"] if new else []
    return first + [f"{stream.name}: {stream.problem}" for stream in broken]


def _priority(name: str, seen: Survey) -> PriorityView:
    streams = [stream for stream in seen.streams if stream.priority == name]
    lags = [stream.lag for stream in streams if stream.lag is not None]
    oldest = [stream.oldest_ms for stream in streams if stream.oldest_ms is not None]
    return PriorityView(
        priority=name,
        waiting=sum(stream.waiting for stream in streams),
        held=sum(count for stream in streams for who, count in stream.held.items() if who != RELEASED),
        lag=sum(lags) if len(lags) == len(streams) else None,
        oldest_ms=max(0, seen.now_ms - min(oldest)) if oldest else None,
    )


def _held(seen: Survey) -> dict[str, int]:
    """Pending entries by consumer, over all streams."""
    counts: dict[str, int] = {}
    for stream in seen.streams:
        for name, count in stream.held.items():
            if name != RELEASED:
                counts[name] = counts.get(name, 0) + count
    return counts


def _worker(name: str, beat_ms: int, answer: Any, jobs: int, now_ms: int) -> WorkerRow:
    names = (*_WORKER_FIELDS, *_ENGINE_FIELDS)
    values = [None] * len(names) if isinstance(answer, Exception) else answer
    fields = {key: text(value) for key, value in zip(names, values, strict=True) if value is not None}
    engine = _engine({key: _number(fields.pop(key, "")) for key in _ENGINE_FIELDS})
    lease, since = _number(fields.pop("lease", "")), _number(fields.pop("since", ""))
    age = max(0, now_ms - beat_ms)
    return WorkerRow(
        name=name,
        state="alive" if age <= (lease or DEFAULT_LEASE_MS) else "silent",
        jobs=jobs,
        heartbeat_ms=age,
        up_ms=None if since is None else max(0, now_ms - since),
        lease_ms=lease,
        engine=engine,
        **fields,
    )


def _engine(numbers: dict[str, int | None]) -> EngineView | None:
    """None when one of them is missing: the worker is older than these, or somebody wrote to its hash."""
    known = {key: number for key, number in numbers.items() if number is not None}
    return EngineView(**known) if len(known) == len(numbers) else None


def _number(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else None
