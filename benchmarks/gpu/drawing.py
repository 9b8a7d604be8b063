"""Sampling on the device: the tokens of the engine's own sampler on a CPU, which is the definition; and its time."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line, not_built
from engine.request import Request, SamplingParams
from engine.sampler import Sampler
from engine.sequence import Sequence

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k, top-p, min-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}
Draw = Callable[[], Tensor]


def logits_like(rows: int, vocab: int) -> Tensor:
    """Peaked as a language model's: the r-th likeliest token falls with r^-1.5."""
    falling = -1.5 * torch.arange(1, vocab + 1).log()
    return torch.stack([falling[torch.randperm(vocab)] for _ in range(rows)])


def engines(logits: Tensor, parameters: dict[str, Any]) -> Draw:
    """The engine's sampler on the logits' device."""
    rows, device = len(logits), logits.device
    sampler, sequences = Sampler(rows, logits.shape[1], device), list[Sequence]()
    for row in range(rows):
        asked = Request(id=f"{row}", tokens=[1], sampling=SamplingParams(**parameters, seed=row))
        sequence = Sequence(asked, limit=100, end_ids=frozenset(), namespace=(), engine_seed=0)
        sequence.row, sequence.pending = row, 1
        sampler.open(sequence)
        sequences.append(sequence)
    positions = torch.arange(rows, device=device)
    return lambda: sampler.draw(logits.clone(), sequences, positions).ids


def kernels(logits: Tensor, parameters: dict[str, Any]) -> Draw:
    """The Triton kernels. Raises ImportError where there are none."""
    from kernels import Parameters
    from kernels.triton.sampling import Lottery

    rows, device = len(logits), logits.device
    asked = SamplingParams(**parameters)
    lottery = Lottery(rows, logits.shape[1], device)
    full = partial(torch.full, (rows,), device=device)
    state = Parameters(
        full(asked.temperature, dtype=torch.float32), full(asked.top_k, dtype=torch.int32),
        full(asked.top_p, dtype=torch.float64), full(asked.min_p, dtype=torch.float64).log().float(),
        torch.arange(rows, device=device), full(-1, dtype=torch.int32),
    )  # fmt: skip
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    out, broken = torch.full((2, rows), -7, dtype=torch.int32, device=device)
    random = asked.temperature > 0
    filtered = asked.top_k > 0 or asked.top_p < 1 or asked.min_p > 0

    def draw() -> Tensor:
        lottery.draw(logits, numbers, numbers, state, out, broken, random=random, filtered=filtered)
        return out

    return draw


def check(machine: Machine) -> Iterator[Line]:
    rows, vocab = (3, 500) if machine.dry else (32, 151936)
    for kind in KINDS:
        yield from machine.attempt(f"draw, {kind}", partial(_compare, machine, kind, rows, vocab))


@torch.inference_mode()
def _compare(machine: Machine, kind: str, rows: int, vocab: int) -> list[Line]:
    logits = logits_like(rows, vocab)
    expected, there = engines(logits, KINDS[kind])(), logits.to(machine.device)
    lines = [_verdict(f"draw, {kind}: engine's sampler", engines(there, KINDS[kind])(), expected)]
    name = f"draw, {kind}: kernels"
    if machine.dry:
        return [*lines, not_built(name, "Triton's kernels are for CUDA")]
    try:
        draw = kernels(there, KINDS[kind])
    except ImportError as error:
        return [*lines, not_built(name, str(error))]
    return [*lines, _verdict(name, draw(), expected)]


def _verdict(name: str, found: Tensor, expected: Tensor) -> Line:
    same = int((found.cpu().to(torch.int64) == expected).sum())
    return Line(name=name, ok=same == len(expected), said=f"{same} of {len(expected)} tokens are those of a CPU")


@torch.inference_mode()
def times(machine: Machine, rows: int, vocab: int) -> Iterator[Line]:
    """Microseconds, beside one pass over the logits."""
    logits = logits_like(rows, vocab).to(machine.device)
    bound = logits.nbytes / machine.bandwidth * 1e6
    for kind, parameters in KINDS.items():
        for whose, make in (("engine's sampler", engines), ("kernels", kernels)):
            name = f"draw, {kind}, {rows} rows: {whose}"
            if whose == "kernels" and machine.dry:
                yield not_built(name, "Triton's kernels are for CUDA")
                continue

            def timed(name: str = name, make: Any = make, parameters: dict[str, Any] = parameters) -> list[Line]:
                try:
                    draw = make(logits, parameters)
                except ImportError as error:
                    return [not_built(name, str(error))]
                # The engine's sends numbers to the device, which no graph can hold: the host's time is in it.
                timer = machine.eager_microseconds if make is engines else lambda work: machine.microseconds([work])
                return [Line(name=name, value=timer(draw), unit="us", bound=bound)]

            yield from machine.attempt(name, timed)
