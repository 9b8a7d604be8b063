"""Whether a position's bits depend on itself alone: what `deterministic` promises, and only a device can show."""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.cases import DRY_SHAPES, SHAPES, Maker, Ragged
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line
from kernels import Backend

Part = tuple[int, int]  # first position and number of positions of one piece of a sequence


def check(machine: Machine) -> Iterator[Line]:
    for name, shape in (DRY_SHAPES if machine.dry else SHAPES).items():
        backend = machine.backend(deterministic=True)
        maker = Maker(machine, backend, shape, seed=3)
        for what, work in (("attention", _attention), ("rows", _rows)):
            title = f"{name}: the same bits, {what}"
            yield from machine.attempt(title, lambda title=title, work=work, maker=maker: [work(title, maker)])


@torch.inference_mode()
def _attention(title: str, maker: Maker) -> Line:
    """The last positions of a sequence by prefill, in chunks, and one by one beside another sequence."""
    length, last = (90, 20) if maker.machine.dry else (1300, 200)
    whole = maker.ragged([last, 1], [length, 40])
    right = whole.attend(maker.backend, [0, 1], [last, 1], [length, 40], whole.q)[:last]
    cuts: list[Part] = [(0, 7), (7, last - 7), (3, 17)]
    cuts += [(at, 1) for at in range(0, last, 3)]
    wrong = [cut for cut in cuts if not _same(whole, maker.backend, cut, right, length - last)]
    said = f"{len(cuts) - len(wrong)} of {len(cuts)} pieces"
    return Line(name=title, ok=not wrong, said=f"{said}; not (first, count) {wrong[:5]}" if wrong else said)


def _same(whole: Ragged, backend: Backend, part: Part, right: Tensor, before: int) -> bool:
    """A piece alone, and beside the other sequence; `before` positions come before the first query."""
    first, count = part
    end, q, other = before + first + count, whole.q[first : first + count], whole.q[-1:]
    alone = whole.attend(backend, [0], [count], [end], q)
    beside = whole.attend(backend, [1, 0], [1, count], [40, end], torch.cat((other, q)))[1:]
    expected = right[first : first + count]
    return torch.equal(alone, expected) and torch.equal(beside, expected)


@torch.inference_mode()
def _rows(title: str, maker: Maker) -> Line:
    """Norms, gates and products of rows alone and in batches."""
    shape, backend = maker.shape, maker.backend
    x, gates, weight = maker.normal(40, shape.hidden), maker.normal(40, 2 * shape.inner), maker.normal(shape.hidden)
    linear = backend.prepare_linear(maker.normal(shape.hidden, shape.hidden))
    works = {
        "norm": lambda rows: backend.rms_norm(x[rows], weight, 1e-6),
        "gate": lambda rows: backend.silu_mul(gates[rows]),
        "product": lambda rows: linear(x[rows]),
    }
    wrong = [
        f"{name} of {count}"
        for name, work in works.items()
        for count in (1, 2, 7, 16, 33)
        if not torch.equal(work(slice(3, 3 + count)), work(slice(0, 40))[3 : 3 + count])
    ]
    return Line(name=title, ok=not wrong, said=f"not of {', '.join(wrong)}" if wrong else "norms, gates and products")
