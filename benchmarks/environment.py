"""Where numbers were measured: without it they mean nothing."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(threads: int) -> dict[str, str | int | float]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else -1.0
    return {
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cpus": cpus(),
        "threads": threads,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load_before": round(load, 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "system": platform.platform(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return done.stdout.strip()
