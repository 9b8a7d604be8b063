"""How many threads: the physical cores that this process was given."""

import math
import os
from pathlib import Path


def physical_cores() -> int:
    """Cores in the affinity mask, hardware threads of one core counted once, at most the control group's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = len({_siblings(number) for number in allowed})
    return max(1, int(min(cores, max(1.0, _quota()))))


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> float:
    """CPUs that the control group grants, as a number; infinite without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return _old_quota()


def _old_quota() -> float:
    folder = Path("/sys/fs/cgroup/cpu")
    try:
        limit, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return limit / period if limit > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
