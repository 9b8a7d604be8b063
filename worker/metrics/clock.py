"""The latencies of one job, so that their counts agree by construction.

First tokens = jobs that got one; between-token times = tokens minus those jobs.
"""

from gllm.protocol import Timings
from worker.metrics.page import Metrics


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
        if self._last is not None:
            self._metrics.inter_token.observe((now - self._last) / count, count)
        else:
            self._begin(now)
            if count > 1:
                self._metrics.inter_token.observe(0.0, count - 1)
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
