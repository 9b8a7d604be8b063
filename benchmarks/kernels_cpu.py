"""The C++ kernels beside what the machine can do at most, in one run; and what a busy neighbour costs them.

    python -m benchmarks.kernels_cpu                 # Qwen3-0.6B's shapes, bfloat16
    python -m benchmarks.kernels_cpu --level avx2    # another level of instructions
    python -m benchmarks.kernels_cpu --quick         # does it run at all

Each time is the best of many. The bound of a product is the larger of reading its weights once and multiplying at the
rate of a product that fits into the caches.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.environment import describe
from benchmarks.kernels_attention import report_attention
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import Library, Missing, load
from kernels.cpu.linear import PackedLinear
from kernels.cpu.memory import Arena
from kernels.cpu.threads import physical_cores

SHAPES = {"qkv": (1024, 4096), "output": (2048, 1024), "gate_up": (1024, 6144), "down": (3072, 1024)}  # inner, outputs
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512)
NEIGHBOUR_STARTS = 0.5  # seconds that an interpreter takes to start
BYTES_AT_LEAST = 96 << 20  # of weights between two uses of the same: more than the caches hold


def best(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of many calls."""
    end, found = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end or found == float("inf"):
        began = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - began)
    return found


class Bench:
    """One level's kernels on so many threads; `seconds` for each number."""

    def __init__(self, library: Library, threads: int, seconds: float) -> None:
        self.cpu = CpuBackend(library, deterministic=True, threads=threads)
        self.library, self.threads, self.seconds = library, threads, seconds

    def read_rate(self, huge: bool) -> float:
        """Bytes per second that all threads read together."""
        size, found = 256 << 20, torch.zeros(1, dtype=torch.int32)
        memory = Arena(self.library.advise_huge if huge else lambda begin, size: None).take(size // 4)
        memory.zero_()
        return size / best(lambda: self.library.read(memory.data_ptr(), size, found.data_ptr()), self.seconds)

    def multiply_rate(self, dtype: torch.dtype) -> float:
        """Operations per second on weights and rows that fit into the caches."""
        rows, inner, outputs = 252, 512, 64 * self.threads
        linear, x = self._linear(inner, outputs, dtype), torch.randn(rows, inner).to(dtype)
        return 2 * rows * inner * outputs / best(lambda: linear(x), self.seconds)

    def product(self, inner: int, outputs: int, rows: int, dtype: torch.dtype) -> float:
        """Seconds of one product whose weights come from memory."""
        count = max(2, -(-BYTES_AT_LEAST // (inner * outputs * dtype.itemsize))) if rows < 64 else 2
        linears, x = [self._linear(inner, outputs, dtype) for _ in range(count)], torch.randn(rows, inner).to(dtype)
        return best(lambda: [linear(x) for linear in linears], self.seconds) / count

    def step(self) -> Callable[[], object]:
        """A pass over four layers' products at one row, as a decode step makes them."""
        layers = [self._linear(*SHAPES[name], torch.bfloat16) for _ in range(4) for name in SHAPES]
        rows = [torch.randn(1, linear.inner).bfloat16() for linear in layers]
        return lambda: [linear(x) for linear, x in zip(layers, rows, strict=True)]

    def _linear(self, inner: int, outputs: int, dtype: torch.dtype) -> PackedLinear:
        return self.cpu.prepare_linear(torch.randn(outputs, inner).to(dtype))


def burn(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    while True:
        pass


@contextmanager
def neighbour() -> Iterator[None]:
    """Another process that keeps one of our cores busy, from when it does so until the block ends."""
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    process = multiprocessing.get_context("spawn").Process(target=burn, args=(core,), daemon=True)
    process.start()
    time.sleep(NEIGHBOUR_STARTS)
    try:
        yield
    finally:
        process.kill()
        process.join()


def times(work: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each of many calls."""
    end, found = time.perf_counter() + seconds, list[float]()
    while time.perf_counter() < end or not found:
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


def report(bench: Bench, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    small, huge, multiply = bench.read_rate(huge=False), bench.read_rate(huge=True), bench.multiply_rate(dtype)
    print(
        f"read {small / 1e9:.1f} GB/s on 4 KiB pages, {huge / 1e9:.1f} on 2 MiB; multiply {multiply / 1e9:.0f} GFLOP/s"
    )
    print(f"{'rows':>5} " + " ".join(f"{name:>22}" for name in SHAPES) + "   (microseconds, share of the bound)")
    for count in rows:
        cells = list[str]()
        for inner, outputs in SHAPES.values():
            took = bench.product(inner, outputs, count, dtype)
            bound = max(inner * outputs * dtype.itemsize / huge, 2 * count * inner * outputs / multiply)
            cells.append(f"{took * 1e6:13.0f} {bound / took:7.0%} ")
        print(f"{count:>5} " + " ".join(cells), flush=True)
    report_attention(bench.cpu, dtype, huge, multiply, lambda work: best(work, bench.seconds))


def beside_neighbour(bench: Bench, turns: int, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of steps alone and beside a neighbour, by turns: whatever else the machine does meets both."""
    step, alone, beside = bench.step(), list[float](), list[float]()
    for _ in range(turns):
        alone += times(step, seconds)
        with neighbour():
            beside += times(step, seconds)
    return alone, beside


def report_neighbour(bench: Bench, turns: int, seconds: float) -> None:
    alone, beside = beside_neighbour(bench, turns, seconds)
    for name, of in (("median", statistics.median), ("mean", statistics.fmean)):
        took, slower = of(alone), of(beside)
        print(
            f"four layers at one row, {name}: {took * 1e3:.2f} ms alone, {slower * 1e3:.2f} ms beside a process on one "
            f"core, {slower / took:.2f} times"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels_cpu", description=__doc__)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--level", default=None)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    library = load(level=options.level)
    if isinstance(library, Missing):
        print(f"no C++ kernels: {library.reason}", file=sys.stderr)
        return 1
    print("\n".join(f"{name:>12}  {value}" for name, value in describe(options.threads).items()))
    print(f"     kernels  {library.numerics}")
    bench = Bench(library, options.threads, 0.01 if options.quick else 0.4)
    report(bench, (1, 16) if options.quick else ROWS, getattr(torch, options.dtype))
    report_neighbour(bench, *((1, 0.1) if options.quick else (5, 1.0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
