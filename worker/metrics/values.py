"""Plain numbers that cost next to nothing to change, and become samples only when somebody reads them.

They are changed and read in the event loop only, so there are no locks. Nothing here raises into the caller: a value
that cannot be is counted by `on_error` instead, because a metric must never stop a job.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from worker.metrics.names import BUCKETS, OTHER

OnError = Callable[[], None]


class Count:
    """A total, as `gllm_<name>_total`."""

    def __init__(self, name: str, text: str, on_error: OnError) -> None:
        self.value = 0
        self._name, self._text = f"gllm_{name}", text
        self._on_error = on_error

    def add(self, amount: int = 1) -> None:
        if amount < 0:
            self._on_error()
        else:
            self.value += amount

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self.value)


class Tally:
    """Totals under one bounded label. Every series exists from the start, so that rate() sees the first event."""

    def __init__(self, name: str, text: str, label: str, values: Iterable[str], on_error: OnError) -> None:
        self._name, self._text, self._label = f"gllm_{name}", text, label
        self._totals = dict.fromkeys((*values, OTHER), 0)
        self._on_error = on_error

    def add(self, value: str, amount: int = 1) -> None:
        if amount < 0:
            self._on_error()
        else:
            self._totals[value if value in self._totals else OTHER] += amount

    def collect(self) -> Iterator[Metric]:
        yield totals(self._name, self._text, self._label, self._totals)


class Seconds:
    """A histogram of durations in seconds. A negative one (a clock was set back) counts as 0; NaN is an error."""

    def __init__(self, name: str, text: str, on_error: OnError, bounds: Sequence[float] = BUCKETS) -> None:
        self._name, self._text, self._bounds = f"gllm_{name}_seconds", text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._on_error = on_error

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, seconds: float, times: int = 1) -> None:
        """`times` durations of the same length."""
        if times < 0 or not math.isfinite(seconds):
            self._on_error()
            return
        seconds = max(0.0, seconds)
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[Metric]:
        yield histogram(self._name, self._text, self._bounds, self._counts, self._sum)


def histogram(name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    """From counts per bucket, the last one for what lies beyond all bounds."""
    edges = [floatToGoString(bound) for bound in (*bounds, math.inf)]
    return HistogramMetricFamily(name, text, buckets=list(zip(edges, accumulate(counts), strict=True)), sum_value=total)


def totals(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter with one label."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value, total in values.items():
        family.add_metric([value], total)
    return family


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge with one label."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def gauge(name: str, text: str, number: float | None) -> Metric:
    """A gauge without labels; without a sample while nothing is known."""
    family = GaugeMetricFamily(name, text)
    if number is not None:
        family.add_metric([], number)
    return family


def info(name: str, text: str, labels: Sequence[str], values: Sequence[str] | None) -> Metric:
    """A gauge of 1 whose labels are what is to be told; without a sample while nothing is known."""
    family = GaugeMetricFamily(name, text, labels=labels)
    if values is not None:
        family.add_metric(values, 1)
    return family
