"""The kernels beside their bounds: the longer of moving their bytes and computing, at this run's ceilings."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu import drawing
from benchmarks.gpu.cases import DRY_SHAPES, SHAPES, Case, Maker, Shape
from benchmarks.gpu.correctness import built
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line, not_built

DECODES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (1, 8192), (32, 8192))  # sequences, context
PREFILLS = (([1024], [1024]), ([8192], [8192]), ([512] * 8, [2048] * 8))  # new tokens, positions
PRODUCT_ROWS = (1, 8, 32, 128)
LARGE_US = 30.0  # from this bound on a decode has a target: below it launches decide
DECODE_TARGET, PREFILL_TARGET, PRODUCT_TARGET = 0.85, 0.45, 0.85


def stage(machine: Machine) -> Iterator[Line]:
    backend = machine.backend()
    yield Line(name="kernels", said=backend.name)
    shapes = DRY_SHAPES if machine.dry else SHAPES
    for name, shape in shapes.items():  # in the order of worth: whatever time does not suffice for comes last
        yield from _attention(machine, name, shape)
    for name, shape in shapes.items():
        yield from _rows(machine, name, shape)
    yield from drawing.times(machine, *((2, 500) if machine.dry else (128, 151936)))
    for name, shape in shapes.items():
        yield from _products(machine, name, shape)


def _attention(machine: Machine, name: str, shape: Shape) -> Iterator[Line]:
    for sequences, context in ((2, 70),) if machine.dry else DECODES:
        moved = sequences * context * shape.kv_heads * shape.width * 2 * machine.dtype.itemsize
        title = f"{name}: decode {sequences} x {context}"
        yield from _timed(machine, title, shape, moved, DECODE_TARGET, sequences=sequences, context=context)
    for counts, lengths in (([40], [40]),) if machine.dry else PREFILLS:
        title = f"{name}: prefill {len(counts)} x {counts[0]} of {lengths[0]}"
        make = partial(_make_attention, counts=counts, lengths=lengths)
        yield from machine.attempt(title, partial(measure, machine, title, shape, make, 1, PREFILL_TARGET, 6), 5)


def _timed(
    machine: Machine, title: str, shape: Shape, moved: int, target: float, *, sequences: int, context: int
) -> Iterator[Line]:
    make = partial(_make_attention, counts=[1] * sequences, lengths=[context] * sequences)
    wanted = target if moved / machine.bandwidth * 1e6 >= LARGE_US else None
    work = partial(measure, machine, title, shape, make, machine.copies(moved), wanted)
    return machine.attempt(title, work, 5)


def _make_attention(maker: Maker, counts: list[int], lengths: list[int]) -> Case:
    return maker.attention(counts, lengths)


def _rows(machine: Machine, name: str, shape: Shape) -> Iterator[Line]:
    rows = 2 if machine.dry else 128
    makes: dict[str, Callable[[Maker], Case]] = {
        "norm": lambda maker: maker.norm(rows),
        "add + norm": lambda maker: maker.add_norm(rows),
        "SiLU": lambda maker: maker.gate(rows, "silu_mul"),
        "heads, normed": lambda maker: maker.heads(rows, normed=True),
    }
    for kind, make in makes.items():
        title = f"{name}: {kind}, {rows} rows"
        if not built(machine.backend(), kind):
            yield not_built(title, f"{machine.backend().name} has no such kernel")
        else:
            yield from machine.attempt(title, partial(measure, machine, title, shape, make, 1, None), 2)


def _products(machine: Machine, name: str, shape: Shape) -> Iterator[Line]:
    outputs = (shape.heads + 2 * shape.kv_heads) * shape.width
    sizes = {"qkv": (shape.hidden, outputs), "output": (shape.heads * shape.width, shape.hidden)}
    sizes |= {"gate_up": (shape.hidden, 2 * shape.inner), "down": (shape.inner, shape.hidden)}
    sizes |= {"head": (shape.hidden, shape.vocab)}
    for rows in (2,) if machine.dry else PRODUCT_ROWS:
        for kind, (inner, out) in sizes.items():
            title, copies = f"{name}: {kind}, {rows} rows", machine.copies(inner * out * machine.dtype.itemsize)
            make = partial(Maker.product, rows=rows, inner=inner, outputs=out)
            work = partial(measure, machine, title, shape, make, copies, PRODUCT_TARGET, 12)
            yield from machine.attempt(title, work, 2)
    for gated in (False, True):
        title = f"{name}: few rows, norm{' and SwiGLU' if gated else ''}, 1 row"
        if not built(machine.backend(), "few rows"):
            yield not_built(title, f"{machine.backend().name} has no such kernel")
            continue
        copies = machine.copies(shape.hidden * (2 * shape.inner if gated else shape.hidden) * machine.dtype.itemsize)
        make = partial(Maker.few_rows, rows=1, normed=True, gated=gated)
        yield from machine.attempt(title, partial(measure, machine, title, shape, make, copies, PRODUCT_TARGET, 12), 2)


@torch.inference_mode()
def measure(
    machine: Machine, title: str, shape: Shape, make: Callable[[Maker], Case], copies: int, target: float | None,
    repeats: int = 24,
) -> list[Line]:  # fmt: skip
    """Microseconds of a case, in turns on so many sets of buffers."""
    case = make(Maker(machine, machine.backend(), shape, seed=1, sets=copies))
    took = machine.microseconds([partial(case.run_on, number) for number in range(copies)], repeats)
    bound = max(case.bytes / machine.bandwidth, case.flops / machine.flops) * 1e6
    said = f"{case.flops / took / 1e6:.0f} TFLOP/s" if case.flops / machine.flops * 1e6 == bound else ""
    return [Line(name=title, value=took, unit="us", bound=bound, target=machine.wanted(target), said=said)]
