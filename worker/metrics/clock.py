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
    Moments for others: `claimed`, `given` to the engine, `first` and `last` token, `over` (its end is known).
    """

    def __init__(self, metrics: Metrics, waited: float, now: float, *, claims: int = 1, published: int = 0) -> None:
        self._metrics = metrics
        self.waited = max(0.0, waited)
        self.claimed = now
        self._resumed = published > 0
        self.given: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.over: float | None = None
        if claims <= 1:
            metrics.queue_wait.observe(waited)

    def tokens(self, count: int, now: float) -> None:
        """`count` new tokens came with one step; several share the time since the step before."""
        if count <= 0:
            return
        if self.last is not None:
            self._metrics.inter_token.observe((now - self.last) / count, count)
        else:
            self._begin(now)
            if count > 1:
                self._metrics.inter_token.observe(0.0, count - 1)
        self.last = now

    def _begin(self, now: float) -> None:
        self.first = now
        if not self._resumed:
            self._metrics.first_token.observe(self.waited + now - self.claimed)

    def end(self, outcome: str, now: float) -> None:
        """The terminal event is written."""
        self._metrics.job_seconds.observe(self.waited + now - self.claimed)
        self._metrics.jobs(outcome)

    def timings(self, now: float) -> Timings:
        """What the reply's terminal event says about this worker's part."""
        first = None if self.first is None else self.first - self.claimed
        return Timings(queue=self.waited, first_token=first, total=now - self.claimed)
