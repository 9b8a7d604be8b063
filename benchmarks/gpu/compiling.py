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

from benchmarks.gpu import drawing
from benchmarks.gpu.bounds import DECODES, PREFILLS
from benchmarks.gpu.cases import DRY_SHAPES, SHAPES, Case, Maker
from benchmarks.gpu.correctness import built, cases
from benchmarks.gpu.machine import Machine, cores
from benchmarks.gpu.report import Line, not_built

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
    return [Line(name=f"share {share}", ok=ok, said=(out if ok else error).strip()[-200:])]


def works(machine: Machine) -> list[Callable[[], object]]:
    """Everything that later stages launch, at sizes that decide a variant."""
    found: list[Callable[[], object]] = []
    for shape in (DRY_SHAPES if machine.dry else SHAPES).values():
        maker = Maker(machine, machine.backend(), shape, seed=1)
        small = cases(maker, dry=machine.dry).items()
        makes = [make for title, make in small if built(maker.backend, title)]
        makes += [partial(maker.attention, [1] * sequences, [64] * sequences) for sequences, _ in DECODES]
        makes += [partial(maker.attention, counts, counts) for counts, _ in PREFILLS[::2]]
        makes += [partial(maker.norm, 128), partial(maker.gate, 128, "silu_mul")]
        found += [partial(launch, make) for make in makes]
    for kind, rows in ((kind, rows) for kind in drawing.KINDS for rows in (32, 128)):
        found.append(partial(draw, machine, kind, rows))
    return found


def launch(make: Callable[[], Case]) -> None:
    make().run()


def draw(machine: Machine, kind: str, rows: int) -> None:
    with suppress(ImportError):  # there may be none; the stages that want them say so
        drawing.kernels(torch.zeros(rows, 151936, device=machine.device), drawing.KINDS[kind])()


def main(share: int, of: int) -> None:
    machine = Machine(dry=False, deadline=float("inf"))
    mine = works(machine)[share::of]
    with torch.inference_mode():
        for work in mine:
            work()
    machine.wait()
    print(f"{len(mine)} launches")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
