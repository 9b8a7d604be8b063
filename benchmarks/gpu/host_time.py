"""What a step costs the host beside a GPU: plan, differences, launch and commit, with every graph replaced by nothing.

    python -m benchmarks.gpu.host_time            # batches of 1 to 128 decodes, and the marks
    python -m benchmarks.gpu.host_time --check    # exit 1 unless the marks are met

The engine is the one that runs on CUDA, on a CPU: same plans, same buffers, same copies, but nothing is computed. What
CUDA's own calls take is not in it: two copies, an event and the launch of one graph a step. Blocks of one token are
measured too: every request gets a new one in every step, the most that a step of decodes ever has to tell. Times are
the median of many steps, of this thread's processor time: others' work does not count.
"""

import argparse
import statistics
import sys

import torch
from msgspec import Struct

from benchmarks.environment import describe
from benchmarks.random_model import make_engine
from benchmarks.step import GREEDY, PROMPT, SAMPLED, STEPS, step_times
from engine import Engine
from engine.resident import ResidentStepper

MARKS = {1: 0.5, 8: 0.5, 32: 1.0, 128: 2.0, 256: 4.0}  # milliseconds a step


class HostTime(Struct, frozen=True):
    """Milliseconds of a step."""

    greedy: float
    sampled: float
    blocks: float


def make_idle(sequences: int, block_size: int = 16) -> Engine:
    """An engine whose graphs are nothing."""
    engine = make_engine(
        "tiny", device="cpu", dtype="float32", kernels="torch", graphs=True, overlap=True, threads=1,
        block_size=block_size, kv_blocks=sequences * (-(-(PROMPT + STEPS) // block_size) + 1),
        max_sequences=sequences, max_step_tokens=sequences * PROMPT,
    )  # fmt: skip
    assert isinstance(engine.runner.stepper, ResidentStepper)
    engine.runner.stepper.graphs.run = lambda form: None
    return engine


def measure(batch: int) -> HostTime:
    kinds = ((GREEDY, 16), (SAMPLED, 16), (GREEDY, 1))
    return HostTime(*(statistics.median(step_times(make_idle(batch, size), batch, kind)) for kind, size in kinds))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.host_time", description="What a step costs the host beside a GPU."
    )
    parser.add_argument("--check", action="store_true", help="exit 1 unless the marks are met")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("\n".join(f"{name:>14}  {value}" for name, value in describe(1).items()))
    met = True
    for batch, mark in MARKS.items():
        cost = measure(batch)
        met &= max(cost.greedy, cost.sampled, cost.blocks) <= mark
        verdict = "met" if cost.greedy <= mark else "NOT MET"
        print(
            f"batch {batch:>3}: {cost.greedy:.3f} ms greedy (at most {mark}: {verdict}), {cost.sampled:.3f} ms sampled,"
            f" {cost.blocks:.3f} ms with a new block for each row"
        )
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
