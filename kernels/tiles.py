"""One key tile of paged attention: gathering it, attending within it, merging it.

What a sequence does not see is replaced by zero before any product: 0 x NaN would be NaN.
"""

from functools import cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows import COUNTS, RowCounts, cancelling

KEYS_PER_TILE = 256  # larger tiles waste work on short contexts, smaller ones cost more merges on long ones


class Span(NamedTuple):
    """The positions first … end - 1: keys that somebody sees. Numbers, or tensors of them."""

    first: Tensor
    end: Tensor


class Paging(NamedTuple):
    """Where keys lie: block tables [S, max_blocks], and how many keys a block and a tile (whole blocks) have."""

    tables: Tensor
    block_size: int
    tile_keys: int

    @classmethod
    def of(cls, tables: Tensor, block_size: int) -> "Paging":
        return cls(tables, block_size, max(1, KEYS_PER_TILE // block_size) * block_size)

    def tile_range(self, first: int, end: int) -> range:
        """The tiles that hold the keys first … end - 1."""
        return range(first // self.tile_keys, -(-end // self.tile_keys))

    def locate(self, sequence: Tensor, tile: Tensor, seen: Span) -> tuple[Tensor, Tensor]:
        """For (sequence, tile) pairs: their blocks, flat, and which keys are not seen [pairs, keys].

        Past a table's end its last column is repeated; those keys are beyond the length.
        """
        device, per_tile = tile.device, self.tile_keys // self.block_size
        column = (tile[:, None] * per_tile + torch.arange(per_tile, device=device)).clamp_(max=self.tables.shape[1] - 1)
        keys = tile[:, None] * self.tile_keys + torch.arange(self.tile_keys, device=device)
        unseen = (keys >= seen.end[:, None]) | (keys < seen.first[:, None])
        return self.tables[sequence[:, None], column].flatten(), unseen


class Scoring(NamedTuple):
    """From products to scores: scaled, and bent towards ±softcap by tanh (Gemma 2) where there is one."""

    scale: float
    softcap: float | None


class Tile(NamedTuple):
    out: Tensor  # attention within the tile, normalised
    scores: Tensor
    weights: Tensor

    @property
    def log_sum(self) -> Tensor:
        """log of the sum of exp(scores) over keys, [..., 1]; the largest weight is exp(max - log_sum)."""
        return self.scores.amax(-1, keepdim=True) - self.weights.amax(-1, keepdim=True).log()


def gather(kv: Tensor, blocks: Tensor, unseen: Tensor) -> Tensor:
    """Key and value tiles as float32 [2, tiles, kv_heads, keys, D], zero where `unseen` [tiles, 1, keys, 1]."""
    _, _, heads, block_size, width = kv.shape
    tiles = unseen.shape[0]
    found = kv.index_select(1, blocks).view(2, tiles, -1, heads, block_size, width)
    paged = found.permute(0, 1, 3, 2, 4, 5).to(torch.float32, memory_format=torch.contiguous_format)
    return paged.reshape(2, tiles, heads, -1, width).masked_fill_(unseen, 0.0)


def attend_tile(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None) -> Tile:
    """q [B, R, D] (scaled), keys and values [B, K, D]; `mask` is added to the scores of the first rows it covers."""
    scores = torch.bmm(q, keys.transpose(1, 2))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores[:, : mask.shape[1]] += mask
    weights = torch.softmax(scores, -1)
    return Tile(torch.bmm(weights, values), scores, weights)


def merge(out: Tensor, total: Tensor, more: Tensor, log_sum: Tensor) -> None:
    """Merge one more tile into out [..., D] and its running log-sum total [..., 1], in place.

    Only exp, log and single arithmetic operations: torch's fused ones round differently at the ends of a tensor.
    """
    top = torch.maximum(total, log_sum)
    merged = ((total - top).exp_() + (log_sum - top).exp_()).log_() + top
    out *= (total - merged).exp_()
    out += more * (log_sum - merged).exp_()
    total.copy_(merged)


def hide(hidden: Tensor) -> Tensor:
    """What to add to scores: minus infinity where `hidden`."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


def row_counts(keys: int, width: int, device: torch.device) -> RowCounts:
    """Which numbers of query rows give the same bits in both products with a tile of `keys` keys."""
    return _measure_row_counts(keys, width, device, torch.get_num_threads())


@cache
def _measure_row_counts(keys: int, width: int, device: torch.device, threads: int) -> RowCounts:
    """Measured for a lone product too: libraries split that one over their threads, and batches product by product."""
    counts = [
        _measure_product(outputs, inner, batch, device, transposed=transposed)
        for outputs, inner, transposed in ((keys, width, True), (width, keys, False))
        for batch in (1, 3)
    ]
    return reduce(RowCounts.both, counts)


def _measure_product(outputs: int, inner: int, batch: int, device: torch.device, *, transposed: bool) -> RowCounts:
    x, w = cancelling(COUNTS[-1], outputs, inner, torch.float32, device)
    right = w.expand(batch, -1, -1).contiguous().transpose(1, 2) if transposed else w.T.repeat(batch, 1, 1)
    return RowCounts.measure(lambda rows: torch.bmm(rows.expand(batch, -1, -1), right).transpose(0, 1), x)
