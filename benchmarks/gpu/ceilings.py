"""What this machine can do at most, measured in this very run: all shares are of these."""

import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line, not_built

COPY, PRODUCT = "copy", "bfloat16 product"  # the names of the lines that later stages read


def stage(machine: Machine) -> Iterator[Line]:
    yield Line(name="device", said=device(machine))
    yield from machine.attempt(COPY, lambda: copy(machine))
    yield from machine.attempt("read", lambda: read(machine))
    yield from machine.attempt(PRODUCT, lambda: product(machine))
    yield from machine.attempt("launches", lambda: launches(machine))


def device(machine: Machine) -> str:
    if machine.dry:
        return "a CPU"
    found = torch.cuda.get_device_properties(machine.device)
    kind = f"{found.name}, sm_{found.major}{found.minor}, {found.multi_processor_count} multiprocessors"
    return f"{kind}, {found.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"


def copy(machine: Machine) -> list[Line]:
    size = 1 << (16 if machine.dry else 31)
    source = torch.ones(size, dtype=torch.int8, device=machine.device)
    target = torch.empty_like(source)
    took = machine.microseconds([lambda: target.copy_(source)], 4)
    return [Line(name=COPY, value=2 * size / took * 1e6 / 1e12, unit="TB/s", said="bytes read and written")]


def read(machine: Machine) -> list[Line]:
    size = 1 << (16 if machine.dry else 31)
    source = torch.ones(size // 4, device=machine.device)
    took = machine.microseconds([source.sum], 4)
    return [Line(name="read (a sum)", value=size / took * 1e6 / 1e12, unit="TB/s")]


def product(machine: Machine) -> list[Line]:
    size = 64 if machine.dry else 8192
    left, right = (torch.randn(size, size, device=machine.device).to(machine.dtype) for _ in range(2))
    took = machine.microseconds([lambda: left @ right], 4)
    return [Line(name=PRODUCT, value=2 * size**3 / took * 1e6 / 1e12, unit="TFLOP/s", said=f"{size} cubed")]


def launches(machine: Machine) -> list[Line]:
    """What a launch costs the host, and what a kernel costs in a graph: a step is hundreds of them."""
    small = torch.zeros(1024, device=machine.device)
    lines = [Line(name="an eager operation, on the host", value=_host(machine, lambda: small.add_(1)), unit="us")]
    if not hasattr(machine.backend(), "add_rms_norm"):
        lines.append(not_built("a Triton launch, on the host", "no Triton kernels here"))
    else:
        x, weight, backend = small[None].to(machine.dtype), small.to(machine.dtype), machine.backend()
        took = _host(machine, lambda: backend.rms_norm(x, weight, 1e-6))
        lines.append(Line(name="a Triton launch, on the host", value=took, unit="us"))
    inside = machine.microseconds([lambda: small.add_(1)], 200)
    return [*lines, Line(name="a kernel inside a graph", value=inside, unit="us")]


def _host(machine: Machine, work: Callable[[], object], times: int = 500) -> float:
    """Microseconds of the host's for one call."""
    work()
    machine.wait()
    began = time.perf_counter()
    for _ in range(times):
        work()
    took = time.perf_counter() - began
    machine.wait()
    return took / times * 1e6
