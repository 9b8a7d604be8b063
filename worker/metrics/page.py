"""Everything that `/metrics` shows, and how the rest of the worker adds to it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.metrics.engine import EngineNumbers
from worker.metrics.names import (
    DEAD_LETTERS,
    ERROR_CODES,
    FINISH_REASONS,
    LAG_BUCKETS,
    REDIS_ERRORS,
    REPAIRS,
    TAKEOVERS,
)
from worker.metrics.processes import Processes
from worker.metrics.queue import QueueNumbers
from worker.metrics.values import Count, Seconds, Tally
from worker.metrics.worker import WorkerNumbers


class Part(Protocol):
    """Something that has samples to show."""

    def collect(self) -> Iterator[Metric]: ...


class Metrics:
    """All numbers of a worker. Changing one costs less than a microsecond; samples are made when somebody reads."""

    def __init__(self) -> None:
        self._errors = 0
        self.engine = EngineNumbers(self.error)
        self.queue = QueueNumbers()
        self.worker = WorkerNumbers()
        self.processes = Processes()
        self.first_token = self._seconds("time_to_first_token", "From submission to the first token of a job")
        self.inter_token = self._seconds("inter_token", "Between consecutive tokens of a job on one worker")
        self.job_seconds = self._seconds("job", "From submission to the end of a job")
        self.queue_wait = self._seconds("queue_wait", "From submission to the first claim of a job")
        self.loop_lag = Seconds("loop_lag", "How late the event loop woke up", self.error, LAG_BUCKETS)
        self.claimed = Count("jobs_claimed", "Jobs that this worker took, each time it took one", self.error)
        self.released = Count("jobs_released", "Jobs handed back for others to take", self.error)
        outcomes = (*FINISH_REASONS, *ERROR_CODES)
        self._jobs = self._tally("jobs", "Jobs ended, by finish reason or error code", "outcome", outcomes)
        self._letters = self._tally("dead_letters", "Dead letters written, by reason", "reason", DEAD_LETTERS)
        self._recoveries = self._tally("recoveries", "Self-healing, by path", "path", (*TAKEOVERS, *REPAIRS))
        self._redis = self._tally("redis_errors", "Errors of Redis commands, by class", "class", REDIS_ERRORS)
        self.registry = CollectorRegistry()
        self.registry.register(_Page(self._parts(), self.error, lambda: self._errors))

    def _seconds(self, name: str, text: str) -> Seconds:
        return Seconds(name, text, self.error)

    def _tally(self, name: str, text: str, label: str, values: Iterable[str]) -> Tally:
        return Tally(name, text, label, values, self.error)

    def _parts(self) -> list[Part]:
        latencies = [self.queue_wait, self.first_token, self.inter_token, self.job_seconds]
        jobs = [self.claimed, self._jobs, self.released, self._letters, self._recoveries, self._redis]
        return [self.worker, self.queue, *jobs, *latencies, self.engine, self.loop_lag, self.processes]

    def error(self) -> None:
        """A value was not recorded or not read."""
        self._errors += 1

    def jobs(self, outcome: str) -> None:
        """A job has had its terminal event: its finish reason, or the code of its error."""
        self._jobs.add(outcome)

    def dead_letter(self, reason: str) -> None:
        """A dead letter was written, or should have been: one of DEAD_LETTERS."""
        self._letters.add(reason)
        self.recovery("dead_letter")

    def recovery(self, path: str, amount: int = 1) -> None:
        """Something healed: one of TAKEOVERS or REPAIRS."""
        self._recoveries.add(path, amount)

    def redis_error(self, kind: str) -> None:
        """A Redis command failed: one of REDIS_ERRORS."""
        self._redis.add(kind)

    def render(self) -> bytes:
        """The text that Prometheus reads (version 0.0.4)."""
        return generate_latest(self.registry)


class _Page(Collector):
    """The parts one after the other; what one of them raises is counted, and the others are shown all the same."""

    def __init__(self, parts: list[Part], on_error: Callable[[], None], errors: Callable[[], int]) -> None:
        self._parts = parts
        self._on_error = on_error
        self._errors = errors

    def describe(self) -> Iterable[Metric]:
        return ()  # else registering would already ask for samples

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            yield from self._shown(part)
        yield CounterMetricFamily("gllm_metrics_errors", "Values not recorded or not read", value=self._errors())

    def _shown(self, part: Part) -> list[Metric]:
        try:
            return list(part.collect())
        except Exception:
            self._on_error()
            return []
