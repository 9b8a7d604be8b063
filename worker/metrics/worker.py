"""What a worker is and how it is: state, lease, jobs in hand, start-up, versions."""

import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from prometheus_client.core import Metric

from worker.metrics.names import BUILD_LABELS, OTHER, STARTUP_PHASES, WORKER_STATES
from worker.metrics.values import gauge, gauges, info


class LeaseTime(NamedTuple):
    """The length of the lease, and when it was last renewed (monotonic); both in seconds."""

    length: float
    renewed: float


class WorkerNumbers:
    """Set the callables to what knows; what is None is not shown."""

    def __init__(self) -> None:
        self.state: Callable[[], tuple[str, bool]] = lambda: ("starting", False)  # its name, and whether it is ready
        self.lease: Callable[[], LeaseTime | None] = lambda: None
        self.active: Callable[[], int | None] = lambda: None
        self.queue: str | None = None
        self._startup: dict[str, float] = {}
        self._started = time.time()
        self._build = (_version("gllm"), platform.python_version(), _version("torch"))

    def phase(self, name: str, seconds: float) -> None:
        """A phase of the start is over; phases of no known name are summed up."""
        if name in STARTUP_PHASES:
            self._startup[name] = max(0.0, seconds)
        else:
            self._startup[OTHER] = self._startup.get(OTHER, 0.0) + max(0.0, seconds)

    def collect(self) -> Iterator[Metric]:
        yield info("gllm_build_info", "Versions of what runs", BUILD_LABELS, self._build)
        yield info("gllm_worker_info", "Which queue this worker serves", ["queue"], self.queue and [self.queue])
        yield gauge("gllm_start_time_seconds", "Unix time of the worker's start", self._started)
        state, ready = self.state()
        states = {name: int(name == state) for name in WORKER_STATES}
        yield gauges("gllm_worker_state", "Whether the worker is in this state", "state", states)
        yield gauge("gllm_worker_ready", "Whether it claims jobs, as /readyz says", int(ready))
        yield gauges("gllm_startup_seconds", "How long each phase of the start took", "phase", self._startup)
        yield from self._work()

    def _work(self) -> Iterator[Metric]:
        lease = self.lease()
        age = None if lease is None else max(0.0, time.monotonic() - lease.renewed)
        yield gauge("gllm_jobs_active", "Jobs claimed that have not ended", self.active())
        yield gauge("gllm_lease_age_seconds", "Time since the lease was last renewed", age)
        yield gauge("gllm_lease_seconds", "Time after which others take the jobs over", lease and lease.length)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
