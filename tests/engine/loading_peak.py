"""How much memory loading takes at its worst: `python -m tests.engine.loading_peak DTYPE KERNELS MODEL...` (Linux).

Prints, for each model, the bytes of its parameters as they are served, and by how much the peak of the process while it
loads, warm-up included, is above what it had before. VmHWM counts everything that is in memory and mapped: pages of the
mapped weight files too. Each model is loaded in a process of its own, forked before torch has any threads.
"""

import os
import sys
from pathlib import Path
from typing import Literal

from engine.config import EngineConfig
from engine.engine import Engine

ME = Path("/proc/self")


def status(name: Literal["VmRSS", "VmHWM"]) -> int:
    lines = (ME / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(model: str, dtype: str, kernels: str) -> tuple[int, int]:
    (ME / "clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    settings = {"device": "cpu", "dtype": dtype, "kernels": kernels, "threads": 1}
    engine = Engine(EngineConfig(model=model, kv_blocks=4, max_sequences=1, max_model_len=64, **settings))
    return engine.info.weight_bytes, status("VmHWM") - before


def main() -> None:
    dtype, kernels, *names = sys.argv[1:]
    for model in names:
        child = os.fork()
        if child == 0:
            print(*measure(model, dtype, kernels), flush=True)
            os._exit(0)
        _, ended = os.waitpid(child, 0)
        if ended:
            sys.exit(f"{model}: the child ended with {ended}")


if __name__ == "__main__":
    main()
