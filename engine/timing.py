"""How long steps take, and how much of that the host itself needed. Plain ints of nanoseconds. No torch."""

from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter_ns

from engine.request import STEP_SECONDS

_BOUNDS_NS = tuple(round(bound * 1e9) for bound in STEP_SECONDS)


class StepTimes:
    """Time during which there was a step, cut where each ends: the pieces add up to the time that the engine was busy.

    With overlap a step begins while the one before it runs, so a piece is the time from one end to the next. `device`
    tells how many nanoseconds went into computing, or into waiting for the device, so far; the rest is the host's.
    """

    def __init__(self, device: Callable[[], int], clock: Callable[[], int] = perf_counter_ns) -> None:
        self.counts = [0] * (len(STEP_SECONDS) + 1)  # steps by the first of STEP_SECONDS that holds them
        self.total_ns = 0
        self.host_ns = 0
        self._device = device
        self._clock = clock
        self._since: int | None = None
        self._device_before = 0

    def begin(self) -> None:
        """A step is being planned. Nothing happens while one is under way."""
        if self._since is None:
            self._since, self._device_before = self._clock(), self._device()

    def idle(self) -> None:
        """There was nothing to plan, and nothing is in flight."""
        self._since = None

    def end(self) -> None:
        """A step has been committed; if another is planned next, it began now."""
        if self._since is None:
            return
        now, device = self._clock(), self._device()
        elapsed = now - self._since
        self.counts[bisect_left(_BOUNDS_NS, elapsed)] += 1
        self.total_ns += elapsed
        self.host_ns += max(0, elapsed - (device - self._device_before))
        self._since, self._device_before = now, device
