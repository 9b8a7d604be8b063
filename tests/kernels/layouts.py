"""Ragged batches over a paged pool, laid out at random, with NaN wherever nothing may be read."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import AttentionBatch, Heads, TorchBackend, reference

NAN = float("nan")


@dataclass
class Ragged:
    """Queries and a pool. Sequence i has `lengths[i]` positions, the last `counts[i]` of which are queries."""

    q: Tensor
    kv: Tensor
    tables: Tensor
    counts: list[int]
    lengths: list[int]
    heads: Heads
    window: int | None = None
    softcap: float | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def rows(self, index: int) -> slice:
        first = sum(self.counts[:index])
        return slice(first, first + self.counts[index])

    def prepare(self) -> AttentionBatch:
        return AttentionBatch(self.counts, self.lengths, self.tables, self.kv.shape[3], self.heads)

    def attend(self, backend: TorchBackend) -> Tensor:
        return backend.attention(self.q, self.kv, self.prepare(), self.scale, self.window, self.softcap)

    def attend_by_reference(self) -> Tensor:
        layout = self.tables, self.counts, self.lengths
        return reference.attention(self.q, self.kv, *layout, self.scale, self.window, self.softcap)

    def poison_unseen(self) -> None:
        """NaN in all positions that no query's window reaches."""
        assert self.window is not None
        for table, count, length in zip(self.tables, self.counts, self.lengths, strict=True):
            for position in range(max(0, length - count + 1 - self.window)):
                block, offset = divmod(position, self.kv.shape[3])
                self.kv[:, table[block], :, offset] = NAN

    def part(self, parts: list[tuple[int, int, int]]) -> "Ragged":
        """A batch of (sequence, first query, queries) of this one, over the same pool."""
        rows = [self.q[self.rows(index)][first : first + count] for index, first, count in parts]
        starts = [self.lengths[index] - self.counts[index] for index, _, _ in parts]
        return Ragged(
            torch.cat(rows),
            self.kv,
            self.tables[[index for index, _, _ in parts]],
            [count for _, _, count in parts],
            [start + first + count for start, (_, first, count) in zip(starts, parts, strict=True)],
            self.heads,
            self.window,
            self.softcap,
        )


def ragged(
    seed: int,
    heads: Heads,
    width: int,
    block_size: int,
    counts: list[int],
    lengths: list[int],
    dtype: torch.dtype = torch.float32,
) -> Ragged:
    """A batch with random content; blocks that nobody owns, block 0 (padding) and what lies past a length are NaN."""
    generator, shuffle = torch.Generator().manual_seed(seed), random.Random(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = shuffle.sample(range(1, sum(needed) + 4), sum(needed))
    kv = torch.full((2, sum(needed) + 4, heads.kv, block_size, width), NAN, dtype=dtype)
    tables = torch.zeros(len(lengths), max(needed) + 2, dtype=torch.int64)
    for index, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        own = [blocks.pop() for _ in range(count)]
        tables[index, :count] = torch.tensor(own)
        for position in range(length):
            block, offset = own[position // block_size], position % block_size
            kv[:, block, :, offset] = torch.randn(2, heads.kv, width, generator=generator).to(dtype)
    q = torch.randn(sum(counts), heads.kv * heads.group, width, generator=generator).to(dtype)
    return Ragged(q, kv, tables, counts, lengths, heads)
