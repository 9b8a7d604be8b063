"""How a decode step grows with the batch and with the context: a table, and a picture. Cost must grow as the work does.

    python -m benchmarks.growth                                 # Qwen3-0.6B's shape, random weights, bfloat16
    python -m benchmarks.growth --plot docs/images/growth.png   # and draw it
    python -m benchmarks.growth --quick                         # a tiny shape: does it run at all

The steps are the engine's own, on sequences whose keys and values are zeros: computing contexts first would take hours.
Bytes are counted: all weights once, and the keys and values of each sequence. Beside a step stands how fast they were
read in it. Only the shape of the curves counts; let nothing else run meanwhile.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from msgspec import Struct

from benchmarks import environment
from benchmarks.random_model import make_engine
from engine.plan import Entry, Plan
from engine.request import Request, SamplingParams
from engine.runner import Runner
from engine.sequence import Sequence

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Grid(Struct, frozen=True):
    """What is measured: batches at one context (tokens), and contexts at some batches."""

    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
    context: int = 512
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    at: tuple[int, ...] = (1, 8)

    @property
    def tokens(self) -> int:
        """Room for the largest point."""
        return max(max(self.batches) * self.context, max(self.at) * max(self.contexts))

    def points(self) -> list[tuple[int, int]]:
        wide = [(batch, self.context) for batch in self.batches]
        return wide + [(batch, context) for batch in self.at for context in self.contexts]


QUICK = Grid(batches=(1, 4), context=32, contexts=(16, 64), at=(1, 2))


class Point(Struct, frozen=True):
    """One step: milliseconds, and the bytes of weights, keys and values that it reads."""

    batch: int
    context: int
    milliseconds: float
    read: int


def measure(runner: Runner, batch: int, context: int, steps: int) -> Point:
    """The median of some decode steps of `batch` sequences that are `context` tokens long."""
    plan = _plan(batch, context)
    runner.collect(runner.launch(plan))
    again = Plan(entries=plan.entries)
    times = list[float]()
    for _ in range(steps):
        began = time.perf_counter()
        runner.collect(runner.launch(again))
        times.append((time.perf_counter() - began) * 1000)
    config = runner.model_config
    kept = 2 * config.layers * config.kv_heads * config.head_dim * runner.dtype.itemsize
    return Point(batch, context, statistics.median(times), runner.weight_bytes + batch * context * kept)


def _plan(batch: int, context: int) -> Plan:
    """A step that gives each sequence its last token, and each its own blocks."""
    columns = -(-context // BLOCK_SIZE)
    plan = Plan()
    for row in range(batch):
        request = Request(id=f"{row}", tokens=[5] * context, sampling=GREEDY)
        sequence = Sequence(
            request, limit=context + 1, end_ids=frozenset(), namespace=(), engine_seed=0, longest=context
        )
        sequence.row, sequence.pending = row, 1
        plan.opened.append(sequence)
        plan.blocks += [(row, column, row * columns + column) for column in range(columns)]
        plan.entries.append(Entry(sequence, 0, row, context - 1, 1, True, False))
    return plan


def run(shape: str, grid: Grid, steps: int, threads: int) -> list[Point]:
    blocks = -(-grid.tokens // BLOCK_SIZE) + max(grid.batches)
    engine = make_engine(
        shape, on_device=False, device="cpu", dtype="bfloat16", block_size=BLOCK_SIZE, kv_blocks=blocks,
        max_sequences=max(grid.batches), threads=threads,
    )  # fmt: skip
    with torch.inference_mode():
        for cache in engine.runner.cache:
            cache.zero_()
    return [measure(engine.runner, batch, context, steps) for batch, context in grid.points()]


def plot(path: Path, title: str, grid: Grid, points: list[Point]) -> None:
    """Two curves side by side, from zero: a cliff would be a step in them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    wide, long = figure.subplots(1, 2)
    chosen = points[: len(grid.batches)]
    wide.plot([p.batch for p in chosen], [p.milliseconds for p in chosen], "o-")
    wide.set(xlabel=f"sequences in the batch, {grid.context:,} tokens each", ylabel="milliseconds a step")
    for batch in grid.at:
        chosen = [point for point in points[len(grid.batches) :] if point.batch == batch]
        label = f"batch of {batch}"
        long.plot([p.context for p in chosen], [p.milliseconds for p in chosen], "o-", label=label)
    long.set(xlabel="tokens of context")
    long.legend()
    for axes in (wide, long):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description="How a decode step grows.")
    parser.add_argument("--quick", action="store_true", help="a tiny shape; the numbers mean little")
    parser.add_argument("--steps", type=int, default=9, help="of each point; the median counts")
    parser.add_argument("--threads", type=int, default=environment.cpus())
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG")
    options = parser.parse_args(arguments)
    shape, grid = ("tiny", QUICK) if options.quick else ("qwen3-0.6b", Grid())
    where = environment.describe(options.threads)
    points = run(shape, grid, options.steps, options.threads)
    print("\n".join(f"{name:>14}  {value}" for name, value in where.items()))
    print(f"\n{'batch':>6} {'context':>8} {'ms/step':>9} {'tokens/s':>9} {'GB/s read':>10}")
    for point in points:
        rate, speed = 1000 * point.batch / point.milliseconds, point.read / point.milliseconds / 1e6
        print(f"{point.batch:>6} {point.context:>8,} {point.milliseconds:>9.2f} {rate:>9.1f} {speed:>10.1f}")
    if options.plot:
        plot(options.plot, f"A decode step of {shape} in bfloat16 on {options.threads} threads", grid, points)


if __name__ == "__main__":
    main()
