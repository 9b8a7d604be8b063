"""What a stage runs on: the device, how much time it has, how large its work may be, and how time is measured there."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.report import Line
from kernels import Backend, select

BANDWIDTH, FLOPS = 4.3e12, 790e12  # of an H200, where this run has not measured them
CACHE_BYTES = 200 << 20  # of buffers between two uses of the same: more than any cache holds


@dataclass
class Machine:
    """`dry`: a CPU and small numbers, to see that everything runs. `deadline` is one of time.monotonic()."""

    dry: bool
    deadline: float
    bandwidth: float = BANDWIDTH  # bytes/s, copied
    flops: float = FLOPS  # of bfloat16 products, 1/s
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.device = torch.device("cpu" if self.dry else "cuda")
        self.dtype = torch.float32 if self.dry else torch.bfloat16

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def backend(self, *, deterministic: bool = False) -> Backend:
        """The fastest kernels there are; its name says whose they are."""
        return select(kernels="auto", deterministic=deterministic, device=self.device, dtype=self.dtype, threads=1)

    def attempt(self, name: str, work: Callable[[], Iterable[Line]], seconds: float = 0.0) -> Iterator[Line]:
        """The lines of one piece of work; its failure is a line too. Skipped when fewer than `seconds` are left."""
        if self.left < seconds:
            yield Line(name=name, said=f"skipped: {self.left:.0f} s left")
            return
        try:
            yield from work()
        except Exception as error:  # whatever it is: the others go on
            yield Line(name=name, ok=False, said=f"{type(error).__name__}: {error}"[:300])

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def wanted(self, target: float | None) -> float | None:
        """A target, but in a dry run, where numbers mean nothing."""
        return None if self.dry else target

    def microseconds(self, works: Sequence[Callable[[], object]], repeats: int = 20) -> float:
        """Median time of one call on the device; `works` do the same on different buffers, so that no cache helps."""
        for work in works:
            work()
        self.wait()
        if self.dry:
            return min(_host_seconds(work) for work in works) * 1e6
        calls = [works[number % len(works)] for number in range(repeats)]
        return statistics.median(_replay(calls))

    def release(self) -> None:
        """Give memory back: an engine is part of a cycle, which lives until the collector comes."""
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def eager_microseconds(self, work: Callable[[], object], repeats: int = 20) -> float:
        """Of one call launched kernel by kernel: the host's time, where that is the longer."""
        work()
        self.wait()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - began) / repeats * 1e6

    def copies(self, size: int) -> int:
        """How many buffers of `size` bytes to take turns with."""
        return 1 if self.dry else max(1, min(64, CACHE_BYTES // max(size, 1) + 1))


def _host_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _replay(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Microseconds a call, of several replays of one graph of all calls: the host's own time is not in them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(7):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / len(calls))
    return times


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
