"""What happens in a queue, out of looks at it one after the other: tokens a second, the share of prompts in the cache.

A worker's numbers come with its heartbeats (every third of a lease), so its rates are those between two of them; a
job's tokens are counted with each look. All times are the server's. Pure bookkeeping, bounded by what a look shows.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from msgspec import Struct

from worker.inspection.records import EngineView, JobList, JobRow, QueueView, WorkerRow

RATE_MS = 10_000  # of which tokens a second are said, once a worker has been seen for so long
HITS_MS = 60_000  # prompts come seldom
JOB_MS = 3000

T = TypeVar("T")


class Look(Struct, frozen=True, kw_only=True):
    """One reading of a queue."""

    now_ms: int
    queue: QueueView
    workers: list[WorkerRow]
    jobs: JobList


class Rates(Struct, frozen=True, kw_only=True):
    """Of one worker or of all. `hit_rate`: of the last minute, else since the start; None where nothing is known."""

    tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    hit_rate: float | None = None


class History(Generic[T]):
    """Values over time by name; those older than `keep_ms` go, but for the last of them."""

    def __init__(self, keep_ms: int) -> None:
        self._keep_ms = keep_ms
        self._values: dict[Hashable, list[tuple[int, T]]] = {}

    def add(self, seen: Iterable[tuple[Hashable, int, T]]) -> None:
        """What is there now, as (name, ms, value). Who is not among them is forgotten."""
        now = {name: (at, value) for name, at, value in seen}
        self._values = {name: self._extended(self._values.get(name, []), *latest) for name, latest in now.items()}

    def _extended(self, values: list[tuple[int, T]], at: int, value: T) -> list[tuple[int, T]]:
        if values and at <= values[-1][0]:
            return values
        recent = [index for index, (when, _) in enumerate(values) if when > at - self._keep_ms]
        return [*values[max(0, (recent[0] if recent else len(values)) - 1) :], (at, value)]

    def span(self, name: Hashable, least_ms: int) -> tuple[int, T, T] | None:
        """(milliseconds, older, newest): the youngest that is `least_ms` older, else the oldest; None before two."""
        values = self._values.get(name, [])
        if len(values) < 2:
            return None
        end, newest = values[-1]
        old = [(at, value) for at, value in values[:-1] if at <= end - least_ms]
        at, older = old[-1] if old else values[0]
        return end - at, older, newest


class Watch:
    """Takes looks; answers for the newest."""

    def __init__(self) -> None:
        self._engines = History[EngineView](HITS_MS)
        self._jobs = History[int](JOB_MS)
        self._alive: dict[str, EngineView] = {}
        self._running: dict[Hashable, int] = {}

    def take(self, look: Look) -> None:
        alive = [(row, row.engine) for row in look.workers if row.state == "alive" and row.engine]
        self._alive = {row.name: engine for row, engine in alive}
        self._engines.add((row.name, look.now_ms - (row.heartbeat_ms or 0), engine) for row, engine in alive)
        self._running = {_key(job): job.tokens for job in look.jobs.jobs if job.state == "running"}
        self._jobs.add((key, look.now_ms, tokens) for key, tokens in self._running.items())

    def job(self, job: JobRow) -> float | None:
        """Tokens a second; None for a job that has not been seen to run twice."""
        return self._job_rate(_key(job))

    def running(self) -> float | None:
        """Tokens a second of all jobs that run now and were seen to do so before: fresher than heartbeats, and less."""
        return _sum(self._job_rate(key) for key in self._running)

    def worker(self, name: str) -> Rates:
        span = self._engines.span(name, RATE_MS)
        return Rates(
            tokens_per_second=_rate(span, "generation_tokens"),
            prompt_tokens_per_second=_rate(span, "prompt_tokens"),
            hit_rate=self._hit_rate([name]),
        )

    def all(self) -> Rates:
        """The sums over all living workers of what is known."""
        each = [self.worker(name) for name in self._alive]
        return Rates(
            tokens_per_second=_sum(rates.tokens_per_second for rates in each),
            prompt_tokens_per_second=_sum(rates.prompt_tokens_per_second for rates in each),
            hit_rate=self._hit_rate(self._alive),
        )

    def hit_rate_total(self) -> float | None:
        """Since the start of the living workers."""
        return _share(self._alive.values())

    def _job_rate(self, key: Hashable) -> float | None:
        span = self._jobs.span(key, JOB_MS)
        return None if span is None else max(0, span[2] - span[1]) * 1000 / span[0]

    def _hit_rate(self, names: Iterable[str]) -> float | None:
        spans = [self._engines.span(name, HITS_MS) for name in names]
        hit = sum(span[2].prefix_hit_tokens - span[1].prefix_hit_tokens for span in spans if span)
        prompt = sum(span[2].prefix_prompt_tokens - span[1].prefix_prompt_tokens for span in spans if span)
        return hit / prompt if prompt > 0 else _share(self._alive[name] for name in names if name in self._alive)


def _key(job: JobRow) -> Hashable:
    return job.stream, job.entry  # an id may be there twice


def _rate(span: tuple[int, EngineView, EngineView] | None, field: str) -> float | None:
    return span and max(0, getattr(span[2], field) - getattr(span[1], field)) * 1000 / span[0]


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _share(engines: Iterable[EngineView]) -> float | None:
    counts = [(engine.prefix_hit_tokens, engine.prefix_prompt_tokens) for engine in engines]
    prompt = sum(tokens for _, tokens in counts)
    return sum(hit for hit, _ in counts) / prompt if prompt else None
