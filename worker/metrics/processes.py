"""Processor time and memory of the worker's two processes, from /proc (Linux; elsewhere there are no such series)."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.core import Metric

from worker.metrics.values import gauges, totals

PROC = Path("/proc")


class Processes:
    """Set `engine` to what gives the engine's process id."""

    def __init__(self) -> None:
        self.engine: Callable[[], int | None] = lambda: None
        self._cpu: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        memory: dict[str, float] = {}
        for name, pid in (("worker", os.getpid()), ("engine", self.engine())):
            if pid is not None and (used := usage(pid)) is not None:
                self._cpu[name], memory[name] = used  # the time of a process that has ended stands
        yield totals("gllm_process_cpu_seconds", "Processor time, user and system", "process", self._cpu)
        yield gauges("gllm_process_resident_memory_bytes", "Memory that is in RAM", "process", memory)


def usage(pid: int) -> tuple[float, float] | None:
    """Seconds of processor time and bytes of resident memory; None when there is no such process, or no /proc."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
        pages = int((PROC / str(pid) / "statm").read_bytes().split()[1])
    except (OSError, IndexError):  # a process that is just ending has an empty statm
        return None
    fields = stat.rpartition(b")")[2].split()  # the name before may hold anything
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK"), float(pages * os.sysconf("SC_PAGE_SIZE"))
