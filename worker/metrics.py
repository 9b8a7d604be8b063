"""What a worker counts, and how Prometheus reads it. Nothing here raises into the caller: a metric never stops a job.

Latencies go through `JobClock`, so that their counts agree by construction: first tokens = jobs that got one,
between-token times = tokens minus those jobs. The engine's numbers are plain ints of its snapshots, read at scrape.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.request import Stats
from engine.wire import EngineInfo
from gllm.keys import PRIORITIES
from gllm.protocol import Timings

T = TypeVar("T")

# One set for all four histograms; the last ones lie beyond the 300 s that a long reply on a CPU needs.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)

# Labels are these and OTHER, never a word from a job: each new value would be a time series that nobody deletes.
OTHER = "other"
FINISH_REASONS = ("stop", "length", "cancelled", "deadline")
ERROR_CODES = ("invalid", "unsupported", "too_large", "max_attempts", "internal")
TAKEOVERS = ("redelivered", "resumed", "released", "duplicate", "dead_letter")
REPAIRS = ("fenced", "repaired", "paused", "group_lost", "entry_lost", "unowned", "reconnected", "consumer_reaped")
REDIS_ERRORS = ("transient", "group_lost", "fenced", "fatal")
ENGINE_LABELS = ("model", "device", "dtype", "deterministic", "numerics")


class Total(NamedTuple):
    """A counter of the engine: its name without gllm_ and _total, and the field of Stats."""

    name: str
    field: str
    text: str


class States(NamedTuple):
    """Gauges of the engine under one name without gllm_: the values of the label `state` and the fields of Stats."""

    name: str
    fields: dict[str, str]
    text: str


ENGINE_TOTALS = (
    Total("prefix_cache_hit_tokens", "prefix_hit_tokens", "Prompt tokens served from the prefix cache, at admission"),
    Total("prefix_cache_prompt_tokens", "prefix_prompt_tokens", "Prompt tokens of admitted requests"),
    Total("prefix_cache_evictions", "prefix_evictions", "Registered KV blocks whose content was given up"),
    Total("prompt_tokens", "prompt_tokens", "Prompt tokens really computed at first admission"),
    Total("generation_tokens", "generation_tokens", "Tokens sampled"),
    Total("preemptions", "preemptions", "Sequences that lost their KV blocks to an older one"),
    Total("preempted_tokens", "preempted_tokens", "Computed tokens thrown away by preemption"),
    Total("recomputed_tokens", "recomputed_tokens", "Tokens computed again after a preemption"),
    Total("resumed_tokens", "resumed_tokens", "Tokens computed again for jobs taken over from another worker"),
    Total("engine_steps", "steps", "Engine steps that ended"),
)
BLOCKS = {"live": "blocks_live", "reclaimable": "blocks_reclaimable", "free": "blocks_free"}
ENGINE_STATES = (
    States("prefix_cache_blocks", BLOCKS, "KV blocks by place; the three sum to the pool"),
    States("sequences", {"running": "running", "waiting": "waiting"}, "Sequences in the engine"),
)


class Seconds(Collector):
    """A histogram of durations in seconds. A negative one (a clock was set back) counts as 0; NaN is an error.

    Of our own, because one is observed for every token: prometheus_client's takes two locks and tries bucket by bucket.
    """

    def __init__(self, name: str, text: str, errors: Counter) -> None:
        self._name = name
        self._text = text
        self._errors = errors
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        if math.isfinite(seconds):
            self._counts[bisect_left(BUCKETS, seconds)] += 1
            self._sum += max(0.0, seconds)
        else:
            self._errors.inc()

    def collect(self) -> Iterator[Metric]:
        bounds = [floatToGoString(bound) for bound in (*BUCKETS, math.inf)]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Tally:
    """A counter with one bounded label. Every series exists from the start, so that rate() sees the first event."""

    def __init__(self, counter: Counter, values: Iterable[str], errors: Counter) -> None:
        self._series = {value: counter.labels(value) for value in (*values, OTHER)}
        self._errors = errors

    def add(self, value: str, amount: int = 1) -> None:
        if amount < 0:
            self._errors.inc()
        else:
            self._series.get(value, self._series[OTHER]).inc(amount)


class EngineCollector(Collector):
    """The engine's numbers at the moment of the scrape. Totals never go back, whatever a snapshot says."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics
        self._latest = Stats()
        self._highest = {total.field: 0 for total in ENGINE_TOTALS}

    def describe(self) -> Iterable[Metric]:
        return ()  # else registering would ask for a snapshot before there is an engine

    def collect(self) -> Iterator[Metric]:
        self._latest = self._read(self._metrics.engine_stats) or self._latest
        yield from self._totals(self._latest)
        yield from _states(self._latest)
        taken = self._read(self._metrics.engine_stats_time)
        if taken is not None:
            age = max(0.0, time.monotonic() - taken)
            yield GaugeMetricFamily("gllm_engine_snapshot_age_seconds", "Age of the engine's numbers", value=age)

    def _read(self, source: Callable[[], T | None]) -> T | None:
        try:
            return source()
        except Exception:  # a scrape must not fail because the engine's side did: what was known last stands
            self._metrics.errors.inc()
            return None

    def _totals(self, stats: Stats) -> Iterator[Metric]:
        for name, field, text in ENGINE_TOTALS:
            self._highest[field] = max(self._highest[field], getattr(stats, field))
            yield CounterMetricFamily(f"gllm_{name}", text, value=self._highest[field])


def _states(stats: Stats) -> Iterator[Metric]:
    for name, fields, text in ENGINE_STATES:
        family = GaugeMetricFamily(f"gllm_{name}", text, labels=["state"])
        for state, field in fields.items():
            family.add_metric([state], getattr(stats, field))
        yield family


class Metrics:
    """Everything `/metrics` shows. Set `engine_stats` and `engine_stats_time` (monotonic seconds) to the bridge's."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        disable_created_metrics()  # a start time per series would double what is stored, and nothing asks for it
        self.registry = registry or CollectorRegistry()
        self.engine_stats: Callable[[], Stats] = Stats
        self.engine_stats_time: Callable[[], float | None] = lambda: None
        self.errors = Counter("gllm_metrics_errors", "Values not recorded or not read", registry=self.registry)
        self.first_token = self._seconds("time_to_first_token", "From submission to the first token of a job")
        self.inter_token = self._seconds("inter_token", "Between consecutive tokens of a job on one worker")
        self.job_seconds = self._seconds("job", "From submission to the end of a job")
        self.queue_wait = self._seconds("queue_wait", "From submission to the first claim of a job")
        outcomes = (*FINISH_REASONS, *ERROR_CODES)
        self._jobs = self._tally("jobs", "Jobs ended, by finish reason or error code", "outcome", outcomes)
        self._recoveries = self._tally("recoveries", "Self-healing, by path", "path", (*TAKEOVERS, *REPAIRS))
        self._redis = self._tally("redis_errors", "Errors of Redis commands, by class", "class", REDIS_ERRORS)
        self._depth = Gauge("gllm_queue_depth", "Jobs waiting in Redis", ["priority"], registry=self.registry)
        self._engine = Gauge("gllm_engine_info", "What the engine is", ENGINE_LABELS, registry=self.registry)
        self.registry.register(EngineCollector(self))

    def _seconds(self, name: str, text: str) -> Seconds:
        seconds = Seconds(f"gllm_{name}_seconds", text, self.errors)
        self.registry.register(seconds)
        return seconds

    def _tally(self, name: str, text: str, label: str, values: Iterable[str]) -> Tally:
        return Tally(Counter(f"gllm_{name}", text, [label], registry=self.registry), values, self.errors)

    def jobs(self, outcome: str) -> None:
        """A job has had its terminal event: its finish reason, or the code of its error."""
        self._jobs.add(outcome)

    def recovery(self, path: str, amount: int = 1) -> None:
        """Something healed: one of TAKEOVERS or REPAIRS."""
        self._recoveries.add(path, amount)

    def redis_error(self, kind: str) -> None:
        """A Redis command failed: one of REDIS_ERRORS."""
        self._redis.add(kind)

    def set_queue_depth(self, priority: str, jobs: int) -> None:
        """How many jobs wait. There is no series before the first call: 0 would tell an autoscaler that none do."""
        self._depth.labels(priority if priority in PRIORITIES else OTHER).set(max(0, jobs))

    def set_engine(self, info: EngineInfo) -> None:
        """The one series of `gllm_engine_info`."""
        deterministic = str(info.deterministic).lower()
        self._engine.clear()
        self._engine.labels(Path(info.model).name, info.device, info.dtype, deterministic, info.numerics).set(1)

    def render(self) -> bytes:
        """The text that Prometheus reads (version 0.0.4)."""
        return generate_latest(self.registry)


class JobClock:
    """The latencies of one job on this worker.

    `waited` is Redis' time from submission to this claim, in seconds; `now` is always `time.monotonic()`. A job that
    was claimed before has its queue wait behind it; one with `published` tokens its first token too, and the gap
    between two workers is no time between tokens.
    """

    def __init__(self, metrics: Metrics, waited: float, now: float, *, claims: int = 1, published: int = 0) -> None:
        self._metrics = metrics
        self._waited = max(0.0, waited)
        self._claimed = now
        self._resumed = published > 0
        self._first: float | None = None
        self._last: float | None = None
        if claims <= 1:
            metrics.queue_wait.observe(waited)

    def tokens(self, count: int, now: float) -> None:
        """`count` new tokens came with one step; several share the time since the step before."""
        if count <= 0:
            return
        share = 0.0 if self._last is None else (now - self._last) / count
        gaps = count if self._last is not None else count - 1
        if self._first is None:
            self._begin(now)
        for _ in range(gaps):
            self._metrics.inter_token.observe(share)
        self._last = now

    def _begin(self, now: float) -> None:
        self._first = now
        if not self._resumed:
            self._metrics.first_token.observe(self._waited + now - self._claimed)

    def end(self, outcome: str, now: float) -> None:
        """The terminal event is written."""
        self._metrics.job_seconds.observe(self._waited + now - self._claimed)
        self._metrics.jobs(outcome)

    def timings(self, now: float) -> Timings:
        """What the reply's terminal event says about this worker's part."""
        first = None if self._first is None else self._first - self._claimed
        return Timings(queue=self._waited, first_token=first, total=now - self._claimed)
