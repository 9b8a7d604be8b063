"""Compile the kernels before they are needed, on all cores: each process launches its share once, the cache is shared.

Nothing is measured while a compiler runs, and no later stage waits for one.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch

from benchmarks.gpu import agreement, drawing
from benchmarks.gpu.cases import DRY_SHAPES, SHAPES, Case, Maker
from benchmarks.gpu.correctness import built, cases
from benchmarks.gpu.machine import Machine, cores
from benchmarks.gpu.report import Line, not_built

MOST = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # entries of a step
PROCESSES = 12  # each has a CUDA context of half a gigabyte


def stage(machine: Machine) -> Iterator[Line]:
    backend = machine.backend()
    if machine.dry or not backend.name.startswith("triton"):
        yield not_built("compile", f"nothing to compile: {backend.name}")
        return
    began, count = time.monotonic(), min(PROCESSES, cores())
    command = [sys.executable, "-m", "benchmarks.gpu.compiling"]
    running = [
        subprocess.Popen([*command, f"{share}", f"{count}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for share in range(count)
    ]
    try:
        for share, process in enumerate(running):
            yield from machine.attempt(f"share {share} of {count}", partial(_finish, machine, share, process))
    finally:
        for process in running:
            process.kill()
    yield Line(name="compile, all shares", value=time.monotonic() - began, unit="s")


def _finish(machine: Machine, share: int, process: subprocess.Popen[str]) -> list[Line]:
    out, error = process.communicate(timeout=max(0.5, machine.left - 1))
    ok = process.returncode == 0
    return [Line(name=f"share {share}", ok=ok, said=(out or error).strip()[-200:])]


def works(machine: Machine) -> list[Callable[[], object]]:
    """Everything that later stages launch, at sizes that decide a variant."""
    found: list[Callable[[], object]] = []
    for shape in (DRY_SHAPES if machine.dry else SHAPES).values():
        maker = Maker(machine, machine.backend(), shape, seed=1)
        small = cases(maker, dry=machine.dry).items()
        makes = [make for title, make in small if built(maker.backend, title)]
        makes += [partial(maker.attention, counts, [64] * len(counts)) for counts in batches()]
        makes += [partial(maker.prepared, counts, [64] * len(counts)) for counts in batches()]
        makes += [partial(maker.norm, 128), partial(maker.gate, 128, "silu_mul")]
        careful = Maker(machine, machine.backend(deterministic=True), shape, seed=1)
        makes += [partial(careful.attention, counts, [64] * len(counts)) for counts in ([33], [33, 1])]
        found += [partial(launch, make) for make in makes]
    found += [partial(draw, machine, kind, rows) for kind in drawing.KINDS for rows in (32, 128)]
    found += [lambda: agreement.run(agreement.engine_on(machine.device.type, graphs=False))]
    return [*found, lambda: agreement.compare_graphs(machine)]


def batches() -> list[list[int]]:
    """Decodes, and decodes beside a chunk: variants for each power of two, and for counts that 16 divides or not."""
    sizes = sorted({size - less for size in MOST for less in (0, 1)} - {0})
    return [[first, *[1] * (size - 1)] for size in sizes for first in (1, 33)]


def launch(make: Callable[[], Case]) -> None:
    make().run()


def draw(machine: Machine, kind: str, rows: int) -> None:
    with suppress(ImportError):  # there may be none; the stages that want them say so
        drawing.kernels(torch.zeros(rows, 151936, device=machine.device), drawing.KINDS[kind])()


def main(share: int, of: int) -> int:
    machine, failures = Machine(dry=False, deadline=float("inf")), list[str]()
    mine = works(machine)[share::of]
    for work in mine:
        try:
            with torch.inference_mode():
                work()
        except Exception as error:  # the others are compiled all the same
            failures.append(f"{type(error).__name__}: {error}")
    machine.wait()
    print(f"{len(mine)} launches" if not failures else f"{len(failures)} of {len(mine)} failed: {failures[0]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
