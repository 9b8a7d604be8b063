"""What waits in Redis, by priority, as this worker saw it last."""

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from worker.backlog import Backlog
from worker.metrics.values import gauges

# What was seen longer ago is not shown: a 0 that is an hour old would tell an autoscaler that nothing waits.
KNOWN_SECONDS = 60.0


class QueueNumbers:
    """No series exist before something was seen, nor when that is longer ago than `life` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.life = KNOWN_SECONDS
        self._clock = clock
        self._waiting: dict[str, float] = {}
        self._new: dict[str, float] = {}
        self._oldest: dict[str, float] = {}
        self._seen_at = 0.0

    def claim(self, waiting: Mapping[str, Backlog]) -> None:
        """What a claim left, by priority. It does not look for the oldest, so what a renewal found stays."""
        for priority, backlog in waiting.items():
            if backlog.waiting <= 0:
                self._oldest[priority] = 0.0
        self._saw(waiting)

    def renewal(self, waiting: Mapping[str, Backlog], now_ms: int) -> None:
        """What a renewal saw at `now_ms` of Redis' clock."""
        for priority, backlog in waiting.items():
            age = 0 if backlog.oldest_ms is None else now_ms - backlog.oldest_ms
            self._oldest[priority] = max(0.0, age / 1000)
        self._saw(waiting)

    def _saw(self, waiting: Mapping[str, Backlog]) -> None:
        self._waiting = {priority: max(0, backlog.waiting) for priority, backlog in waiting.items()}
        self._new = {priority: max(0, backlog.new) for priority, backlog in waiting.items()}
        self._seen_at = self._clock()

    def collect(self) -> Iterator[Metric]:
        if self._clock() - self._seen_at > self.life:
            self._waiting, self._new, self._oldest = {}, {}, {}
        yield gauges("gllm_queue_depth", "Jobs waiting in Redis", "priority", self._waiting)
        yield gauges("gllm_queue_lag", "Waiting jobs that were never handed out", "priority", self._new)
        yield gauges("gllm_queue_oldest_seconds", "Time that the oldest waiting job waits", "priority", self._oldest)
