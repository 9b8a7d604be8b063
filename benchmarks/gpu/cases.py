"""One use of one kernel: how to launch it, what is right, and what it must move and compute at least."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import exact
from benchmarks.gpu.machine import Machine
from kernels import AttentionBatch, Backend, Heads, ResidentBatch, State, Step

NAN = float("nan")
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    """`run` launches and gives the result, a new one each time; `exact` gives it in float64.

    `run_on` takes the number of a set of buffers, so that runs in a row do not find each other's data in a cache.
    """

    run_on: Callable[[int], Tensor]
    exact: Callable[[], Tensor]
    bytes: int
    flops: int = 0

    def run(self) -> Tensor:
        return self.run_on(0)


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    vocab: int

    @property
    def grouped(self) -> Heads:
        return Heads(self.kv_heads, self.heads // self.kv_heads)


SHAPES = {
    "llama-8b": Shape(4096, 14336, 32, 8, 128, 128256),
    "qwen3-0.6b": Shape(1024, 3072, 16, 8, 128, 151936),
}
DRY_SHAPES = {"tiny": Shape(64, 96, 4, 2, 16, 500)}


@dataclass(frozen=True, slots=True)
class Ragged:
    """Queries, a pool, and where each sequence lies in it."""

    q: Tensor
    kv: Tensor
    tables: Tensor
    grouped: Heads

    def fresh(self, maker: "Maker") -> "Ragged":
        """The same numbers elsewhere in memory."""
        return Ragged(maker.normal(*self.q.shape), self.kv.clone(), self.tables, self.grouped)

    def attend(self, backend: Backend, rows: list[int], counts: list[int], lengths: list[int], q: Tensor) -> Tensor:
        """Attention of the sequences in these rows of the tables."""
        batch = AttentionBatch(counts, lengths, self.tables[rows], self.kv.shape[3], self.grouped)
        return backend.attention(q, self.kv, batch, self.q.shape[2] ** -0.5)


class Maker:
    """Makes cases with fresh random inputs; `sets` of them for `run_on`."""

    def __init__(self, machine: Machine, backend: Backend, shape: Shape, seed: int, sets: int = 1) -> None:
        self.machine, self.backend, self.shape, self.sets = machine, backend, shape, sets
        self._generator = torch.Generator(machine.device).manual_seed(seed)
        self._random = random.Random(seed)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.machine.device).to(self.machine.dtype)

    def several(self, *size: int) -> list[Tensor]:
        return [self.normal(*size) for _ in range(self.sets)]

    def numbers(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.machine.device)

    # -- rows -----------------------------------------------------------------------------------------------------

    def norm(self, rows: int) -> Case:
        xs, weight = self.several(rows, self.shape.hidden), self.normal(self.shape.hidden)
        run = lambda number: self.backend.rms_norm(xs[number], weight, EPS)  # noqa: E731
        return Case(run, lambda: exact.rms_norm(xs[0], weight, EPS), 2 * xs[0].nbytes)

    def add_norm(self, rows: int) -> Case:
        """The sum, in place, and its norm; Triton's only."""
        fused: Any = getattr(self.backend, "add_rms_norm")  # noqa: B009
        hiddens, mores = self.several(rows, self.shape.hidden), self.several(rows, self.shape.hidden)
        before, weight = hiddens[0].clone(), self.normal(self.shape.hidden)
        right = lambda: exact.rms_norm((before + mores[0]), weight, EPS)  # noqa: E731
        return Case(lambda n: fused(hiddens[n], mores[n], weight, EPS), right, 4 * before.nbytes)

    def gate(self, rows: int, kind: str) -> Case:
        gates = self.several(rows, 2 * self.shape.inner)
        run: Callable[[Tensor], Tensor] = getattr(self.backend, kind)
        right: Callable[[Tensor], Tensor] = getattr(exact, kind)
        return Case(lambda number: run(gates[number]), lambda: right(gates[0]), gates[0].nbytes * 3 // 2)

    # -- attention ------------------------------------------------------------------------------------------------

    def attention(
        self, counts: list[int], lengths: list[int], window: int | None = None, softcap: float | None = None,
        block_size: int = 16,
    ) -> Case:  # fmt: skip
        sets = [self.ragged(counts, lengths, block_size)]
        sets += [sets[0].fresh(self) for _ in range(self.sets - 1)]
        first, scale = sets[0], self.shape.width**-0.5
        batch = AttentionBatch(counts, lengths, first.tables, block_size, self.shape.grouped)  # of all, as in a step
        run = lambda n: self.backend.attention(sets[n].q, sets[n].kv, batch, scale, window, softcap)  # noqa: E731
        right = partial(exact.attention, first.q, first.kv, first.tables, counts, lengths, window, softcap)
        key_bytes = self.shape.kv_heads * self.shape.width * 2 * first.kv.element_size()
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in zip(counts, lengths, strict=True))
        moved = sum(lengths) * key_bytes + 2 * first.q.nbytes
        return Case(run, right, moved, 4 * self.shape.heads * self.shape.width * pairs)

    def prepared(self, counts: list[int], lengths: list[int], window: int | None = None) -> Case:
        """The same of a batch that the device prepares from its own state: what graphs hold."""
        whole, scale = self.ragged(counts, lengths), self.shape.width**-0.5
        batch = self._prepare(whole, counts, lengths)
        run = lambda _: self.backend.attention(whole.q, whole.kv, batch, scale, window)  # noqa: E731
        right = partial(exact.attention, whole.q, whole.kv, whole.tables, counts, lengths, window, None)
        return Case(run, right, 0)

    def _prepare(self, whole: "Ragged", counts: list[int], lengths: list[int]) -> ResidentBatch:
        device, rows = self.machine.device, list(range(len(counts)))
        resident = self.backend.resident(device, self.shape.grouped, self.shape.width)
        assert resident is not None
        state = State.make(len(rows), whole.tables.shape[1], whole.kv.shape[3], device)
        state.clear(0)
        state.tables[:-1] = whole.tables.int()
        firsts = [length - count for length, count in zip(lengths, counts, strict=True)]
        step, decodes = Step.make(sum(counts), len(rows), device), max(counts) == 1
        if decodes:
            state.places[:-1], state.lengths[:-1] = (self.numbers(part, torch.int32) for part in (rows, firsts))
            resident.advance(state, step)
        else:
            numbers = self.numbers([*rows, *firsts, *counts, *[0] * len(rows)], torch.int32)
            resident.open(state, step, numbers.view(4, -1), self.numbers([0] * sum(counts), torch.int32))
        alone = [length for count, length in zip(counts, lengths, strict=True) if count == 1]
        return ResidentBatch(state, step, self.shape.grouped, decodes, resident.splits(alone) + 3)

    def ragged(self, counts: list[int], lengths: list[int], block_size: int = 16) -> "Ragged":
        """A ragged batch over scattered blocks; all that belongs to nobody is NaN."""
        needed = [-(-length // block_size) for length in lengths]
        tables = self._tables(needed)
        kv = self._pool(tables, needed, lengths, block_size)
        return Ragged(self.normal(sum(counts), self.shape.heads, self.shape.width), kv, tables, self.shape.grouped)

    def _tables(self, needed: list[int]) -> Tensor:
        """Blocks at random, none twice; block 0 is for padding. As wide as an engine's, a multiple of 16."""
        blocks = self._random.sample(range(1, sum(needed) + 4), sum(needed))
        rows, width = [[blocks.pop() for _ in range(count)] for count in needed], max(needed) // 16 * 16 + 16
        return self.numbers([row + [0] * (width - len(row)) for row in rows])  # pyright: ignore[reportArgumentType]

    def _pool(self, tables: Tensor, needed: list[int], lengths: list[int], block_size: int) -> Tensor:
        kv = self.normal(2, sum(needed) + 4, self.shape.kv_heads, block_size, self.shape.width)
        owned = torch.zeros(kv.shape[1], dtype=torch.bool, device=kv.device)
        for row, count in zip(tables, needed, strict=True):
            owned[row[:count]] = True
        kv[:, ~owned] = NAN
        for row, count, length in zip(tables, needed, lengths, strict=True):
            if length % block_size:
                kv[:, row[count - 1], :, length % block_size :] = NAN
        return kv

    def heads(self, tokens: int, *, normed: bool) -> Case:
        """Norms of heads, rotation and the store in one launch; Triton's only."""
        fused: Any = getattr(self.backend, "norm_rope_store")  # noqa: B009
        shape, block_size = self.shape, 16
        every = shape.heads + 2 * shape.kv_heads
        qkvs = self.several(tokens, every, shape.width)
        norms = (self.normal(shape.width), self.normal(shape.width)) if normed else None
        blocks, offsets = self.numbers(list(range(tokens))), self.numbers([t % block_size for t in range(tokens)])
        positions = self.numbers([self._random.randrange(2000) for _ in range(tokens)], torch.int32)
        planes = torch.arange(shape.width // 2, device=self.machine.device) / (shape.width // 2)
        angles = torch.outer(torch.arange(2000.0, device=self.machine.device), 1e4**-planes)
        turn = (
            torch.cat((angles.cos(),) * 2, 1)[:, None],
            torch.cat((-angles.sin(), angles.sin()), 1)[:, None],
            positions,
        )
        kv = torch.full((2, tokens, shape.kv_heads, block_size, shape.width), NAN, device=self.machine.device)
        kv = kv.to(self.machine.dtype)
        places = blocks.int(), offsets.int()

        def run(number: int) -> Tensor:
            queries = fused(qkvs[number], kv, norms, turn, places, EPS)
            return torch.cat((queries, *kv[:, blocks, :, offsets].unbind(1)), 1) if number == 0 else queries

        def right() -> Tensor:
            turned, values = qkvs[0].double().split((shape.heads + shape.kv_heads, shape.kv_heads), 1)
            if norms is not None:
                pairs = zip(turned.split((shape.heads, shape.kv_heads), 1), norms, strict=True)
                turned = torch.cat([exact.rms_norm(part, weight, EPS) for part, weight in pairs], 1)
            return torch.cat((exact.rope(turned, angles[positions]), values), 1)

        return Case(run, right, 2 * qkvs[0].nbytes)

    # -- products -------------------------------------------------------------------------------------------------

    def product(self, rows: int, inner: int, outputs: int) -> Case:
        weights = self.several(outputs, inner)
        linears = [self.backend.prepare_linear(weight) for weight in weights]
        x = self.normal(rows, inner)
        moved = (outputs * inner + rows * (inner + outputs)) * x.element_size()
        return Case(
            lambda n: linears[n](x), lambda: x.double() @ weights[0].double().T, moved, 2 * rows * inner * outputs
        )

    def few_rows(self, rows: int, *, normed: bool = False, gated: bool = False, added: bool = False) -> Case:
        """A product of at most 16 rows with what stands before and after it; Triton's only."""
        from kernels.triton.products import multiply_few

        inner = self.shape.hidden
        outputs = self.shape.inner if gated else inner
        x, norm, weights = self.normal(rows, inner), self.normal(inner), self.several(outputs * (1 + gated), inner)
        residual = self.normal(rows, outputs) if added else None
        scale = (norm, EPS) if normed else None

        def right() -> Tensor:
            y = (exact.rms_norm(x, norm, EPS) if normed else x.double()) @ weights[0].double().T
            y = exact.silu_mul(y) if gated else y
            return y if residual is None else y + residual

        moved = weights[0].nbytes + x.nbytes
        run = lambda n: multiply_few(x, weights[n], norm=scale, gated=gated, residual=residual)  # noqa: E731
        return Case(run, right, moved, 2 * rows * len(weights[0]) * inner)


def poison(machine: Machine) -> None:
    """Leave NaN in the memory that the next results will lie in."""
    sizes = [1 << power for power in range(9, 15 if machine.dry else 24)]
    held = [torch.full((size,), NAN, dtype=machine.dtype, device=machine.device) for size in sizes for _ in range(4)]
    del held


def worst_row(out: Tensor, right: Tensor) -> float:
    """The largest relative error of a row (its last dimension); infinite where NaN stands in the wrong place."""
    out, right = out.double().flatten(0, -2), right.flatten(0, -2)
    if bool((out.isnan() != right.isnan()).any()):
        return float("inf")
    difference = (out - right).nan_to_num().norm(dim=-1)
    return float((difference / right.nan_to_num().norm(dim=-1).clamp(min=1e-6)).max())
