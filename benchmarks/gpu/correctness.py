"""Whether each kernel, and the engine on them, computes what it should: fresh inputs every time, outputs poisoned."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import agreement, drawing, invariance, preparing
from benchmarks.gpu.cases import DRY_SHAPES, SHAPES, Case, Maker, poison, worst_row
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line, not_built
from kernels import Backend

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
TRITON_ONLY = (
    "add + norm",
    "heads",
    "few rows",
    "prepared",
)  # titles that begin so: beyond the door that all backends have


def cases(maker: Maker, *, dry: bool) -> dict[str, Callable[[], Case]]:
    """Every kernel, small: layouts that touch each branch."""
    long = 70 if dry else 1300
    mixed, decodes = ([1, 9, 1, 33], [long, 9, 1, 40]), ([1] * 5, [1, 16, 17, 65, long])
    return {
        "norm": lambda: maker.norm(7),
        "add + norm": lambda: maker.add_norm(7),
        "SiLU": lambda: maker.gate(5, "silu_mul"),
        "GELU": lambda: maker.gate(5, "gelu_mul"),
        "heads": lambda: maker.heads(5, normed=False),
        "heads, normed": lambda: maker.heads(5, normed=True),
        "few rows": lambda: maker.few_rows(5),
        "few rows, norm": lambda: maker.few_rows(16, normed=True),
        "few rows, norm and SwiGLU": lambda: maker.few_rows(1, normed=True, gated=True),
        "few rows, residual": lambda: maker.few_rows(7, added=True),
        "product": lambda: maker.product(5, maker.shape.hidden, 3 * maker.shape.hidden),
        "decode": lambda: maker.attention(*decodes),
        "decode, windowed": lambda: maker.attention(*decodes, window=40),
        "decode, soft-capped": lambda: maker.attention(*decodes, softcap=5.0),
        "decode, blocks of 64": lambda: maker.attention(*decodes, block_size=64),
        "prefill": lambda: maker.attention([long], [long]),
        "chunk": lambda: maker.attention([long // 2], [long]),
        "mixed": lambda: maker.attention(*mixed),
        "mixed, windowed": lambda: maker.attention(*mixed, window=30),
        "prepared decode": lambda: maker.prepared(*decodes),
        "prepared decode, windowed": lambda: maker.prepared(*decodes, window=40),
        "prepared mixed": lambda: maker.prepared(*mixed),
        "prepared mixed, windowed": lambda: maker.prepared(*mixed, window=30),
        "mixed, soft-capped": lambda: maker.attention(*mixed, softcap=5.0),
    }


def stage(machine: Machine) -> Iterator[Line]:
    backend = machine.backend()
    yield Line(name="kernels", said=backend.name)
    for name, shape in (DRY_SHAPES if machine.dry else SHAPES).items():
        seed = random.SystemRandom().randrange(2**31)
        yield Line(name=f"{name}: inputs' seed", value=seed)
        for title, make in cases(Maker(machine, backend, shape, seed), dry=machine.dry).items():
            if not built(backend, title):
                yield not_built(f"{name}: {title}", f"{backend.name} has no such kernel")
            else:
                yield from machine.attempt(f"{name}: {title}", partial(check, machine, f"{name}: {title}", make))
    yield from invariance.check(machine)
    yield from preparing.check(machine, built=built(backend, "heads"))
    yield from drawing.check(machine)
    yield from agreement.check(machine)
    yield from machine.attempt("compute-sanitizer", lambda: sanitize(machine))


def built(backend: Backend, title: str) -> bool:
    return not title.startswith(TRITON_ONLY) or backend.name.startswith("triton")


@torch.inference_mode()
def check(machine: Machine, name: str, make: Callable[[], Case]) -> list[Line]:
    case = make()
    poison(machine)
    out = case.run()
    machine.wait()
    error, allowed = worst_row(out, case.exact()), TOLERANCES[machine.dtype]
    return [Line(name=name, value=error, unit="error", ok=error <= allowed, said=f"worst row; {allowed:g} allowed")]


def sanitize(machine: Machine) -> list[Line]:
    """One case with every access to memory watched, in a process of its own."""
    name = "compute-sanitizer"
    places = [shutil.which(name), *map(str, Path("/usr/local").glob(f"cuda*/bin/{name}"))]
    tool = next((place for place in places if place), None)
    if tool is None or machine.dry:
        return [not_built(name, "it is not on this machine" if tool is None else "there is no CUDA in a dry run")]
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu.correctness"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or what lies beyond a tensor is torch's own
    seconds = min(40.0, max(5.0, machine.left - 2))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, env=environment)
    said = done.stdout.strip().splitlines()[-1:] or done.stderr.strip().splitlines()[-1:]
    return [Line(name=f"{name}: mixed attention", ok=done.returncode == 0, said=" ".join(said)[:200])]


if __name__ == "__main__":  # under the sanitizer
    watched = Machine(dry=False, deadline=float("inf"))
    watched_maker = Maker(watched, watched.backend(), SHAPES["qwen3-0.6b"], 1)
    print(check(watched, "mixed", lambda: watched_maker.attention([1, 9, 1, 33], [70, 9, 1, 40]))[0].text())
