"""Paged attention in plain torch, in one order of accumulation over absolute key positions.

Keys are taken in tiles at fixed absolute positions. Each (query row, tile) product has the same shape whoever asks, and
tiles are merged one by one, in order (flash-decoding's split, Dao et al. 2023, with a split that only the position
decides). So a row's result is the same, bit for bit, from a decode step, from a chunk and from a whole prefill.

What lies beyond a sequence's length is replaced by zero before any product: 0 x NaN would be NaN.
"""

from dataclasses import dataclass
from functools import cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows import COUNTS, TILE, RowCounts, cancelling

PAIRS = 64  # (sequence, key tile) pairs whose keys and values a decode gathers at once: bounds its memory
KEYS_PER_TILE = 256  # larger tiles waste work on short contexts, smaller ones cost more merges on long ones


@dataclass(frozen=True, slots=True)
class Heads:
    """How query heads share key/value heads: `kv` groups of `group` query heads."""

    kv: int
    group: int


class AttentionBatch:
    """A ragged batch, prepared once per step and used by all its layers.

    Sequence i owns the next `query_lengths[i]` tokens, which are the last positions of its `lengths[i]`;
    `tables` [S, max_blocks] are its blocks (int64, on the cache's device).
    """

    def __init__(
        self, query_lengths: list[int], lengths: list[int], tables: Tensor, block_size: int, heads: Heads
    ) -> None:
        self.tables, self.block_size, self.heads = tables, block_size, heads
        self.tile_keys = max(1, KEYS_PER_TILE // block_size) * block_size
        self.parts: list[_Decodes | _Chunk] = []
        first, decodes = 0, list[_Decode]()
        for index, (count, length) in enumerate(zip(query_lengths, lengths, strict=True)):
            if count == 1:
                decodes.append(_Decode(length, first, index))
            else:
                self.parts.append(_Chunk(self, index, first, count, length))
            first += count
        if decodes:
            self.parts.append(_Decodes(self, sorted(decodes, key=lambda decode: -decode.length)))
        self.tokens = first


class _Decode(NamedTuple):
    length: int
    token: int
    sequence: int


def paged_attention(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """q [T, heads, D], kv [2, blocks, kv_heads, block_size, D] -> [T, heads, D] in q's dtype."""
    if len(batch.parts) == 1 and batch.parts[0].in_order:
        return batch.parts[0].attend(q, kv, scale)
    out = torch.empty_like(q)
    for part in batch.parts:
        out[part.tokens] = part.attend(q[part.tokens], kv, scale)
    return out


def _row_counts(keys: int, width: int, device: torch.device) -> RowCounts:
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


def _gather(kv: Tensor, blocks: Tensor, invalid: Tensor) -> Tensor:
    """Key and value tiles as float32 [2, tiles, kv_heads, keys, D], zero where `invalid` [tiles, 1, keys, 1]."""
    _, _, heads, block_size, width = kv.shape
    tiles = invalid.shape[0]
    found = kv.index_select(1, blocks).view(2, tiles, -1, heads, block_size, width)
    paged = found.permute(0, 1, 3, 2, 4, 5).to(torch.float32, memory_format=torch.contiguous_format)
    return paged.reshape(2, tiles, heads, -1, width).masked_fill_(invalid, 0.0)


class _Tile(NamedTuple):
    out: Tensor  # attention within the tile, normalised
    scores: Tensor
    weights: Tensor

    @property
    def log_sum(self) -> Tensor:
        """log of the sum of exp(scores) over keys, [..., 1]; the largest weight is exp(max - log_sum)."""
        return self.scores.amax(-1, keepdim=True) - self.weights.amax(-1, keepdim=True).log()


def _attend_tile(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> _Tile:
    """q [B, R, D], keys and values [B, K, D]; `mask` is added to the scores of the first rows it covers."""
    scores = torch.bmm(q, keys.transpose(1, 2))
    if mask is not None:
        scores[:, : mask.shape[1]] += mask
    weights = torch.softmax(scores, -1)
    return _Tile(torch.bmm(weights, values), scores, weights)


def _merge(out: Tensor, total: Tensor, more: Tensor, log_sum: Tensor) -> None:
    """Merge one more tile into out [..., D] and its running log-sum total [..., 1], in place.

    Only exp, log and single arithmetic operations: torch's fused ones round differently at the ends of a tensor.
    """
    top = torch.maximum(total, log_sum)
    merged = ((total - top).exp_() + (log_sum - top).exp_()).log_() + top
    out *= (total - merged).exp_()
    out += more * (log_sum - merged).exp_()
    total.copy_(merged)


class _Pairs(NamedTuple):
    """Consecutive key tiles of the decodes that have them: `having[j]` sequences for the j-th, one pair each."""

    having: list[int]
    blocks: Tensor
    invalid: Tensor
    mask: Tensor


class _Decodes:
    """All sequences with one query token: every (sequence, key tile) pair is one entry of a batched product.

    Sequences are sorted by falling length, so that those with a j-th tile are the first ones.
    """

    def __init__(self, batch: AttentionBatch, decodes: list[_Decode]) -> None:
        self.heads, self.keys = batch.heads, batch.tile_keys
        self.tokens = torch.tensor([decode.token for decode in decodes], device=batch.tables.device)
        self.in_order = [decode.token for decode in decodes] == list(range(len(decodes)))
        tiles = -(-decodes[0].length // self.keys)
        having = [sum(1 for decode in decodes if decode.length > tile * self.keys) for tile in range(tiles)]
        at_once = max(1, PAIRS // len(decodes))
        self.pairs = [_pairs(batch, decodes, having[t : t + at_once], t) for t in range(0, tiles, at_once)]
        self.many = tiles > 1

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        count, heads, width = q.shape
        group = self.heads.group
        rows = _row_counts(self.keys, width, q.device).padded(group)
        padded = q.new_zeros(count, self.heads.kv, rows, width, dtype=torch.float32)
        padded[:, :, :group].copy_(q.view(count, self.heads.kv, group, width)).mul_(scale)  # scaled after it is float32
        return self._attend(padded, kv)[:, :, :group].reshape(count, heads, width).to(q.dtype)

    def _attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """q [S, kv_heads, rows, D] in order of falling length -> the same, attended."""
        tiles = [tile for pairs in self.pairs for tile in self._attend_pairs(q, kv, pairs)]
        out, total = tiles[0]
        for more, log_sum in tiles[1:]:
            _merge(out[: len(more)], total[: len(more)], more, log_sum)
        return out

    def _attend_pairs(self, q: Tensor, kv: Tensor, pairs: _Pairs) -> list[tuple[Tensor, Tensor]]:
        """For each tile, attention within it of the sequences that have it, and their log-sums (if tiles are many)."""
        keys, values = _gather(kv, pairs.blocks, pairs.invalid).flatten(1, 2)
        having = pairs.having
        queries = q[: having[0]] if len(having) == 1 else torch.cat([q[:count] for count in having])
        tile = _attend_tile(queries.flatten(0, 1), keys, values, pairs.mask.expand(-1, q.shape[2], -1))
        outs = tile.out.view(queries.shape)
        if not self.many:
            return [(outs, outs)]
        log_sums = tile.log_sum.view(*queries.shape[:3], 1)
        return list(zip(outs.split(having), log_sums.split(having), strict=True))


def _pairs(batch: AttentionBatch, decodes: list[_Decode], having: list[int], first_tile: int) -> _Pairs:
    device = batch.tables.device
    pairs = [(decodes[i], tile) for tile, count in enumerate(having, first_tile) for i in range(count)]
    sequence, tile, length = torch.tensor([(d.sequence, tile, d.length) for d, tile in pairs], device=device).T
    blocks, invalid = _tile_layout(batch, sequence, tile, length)
    mask = torch.zeros(invalid.shape, device=device).masked_fill_(invalid, -torch.inf)
    return _Pairs(having, blocks, invalid[:, None, :, None], mask.repeat_interleave(batch.heads.kv, 0)[:, None])


class _TileRows(NamedTuple):
    """The query rows that see a key tile: from `start` (a multiple of TILE) on; those before `first` see none of it."""

    start: int
    first: int
    mask: Tensor | None  # added to the scores of the rows from `start` on that do not see the whole tile


class _Chunk:
    """One sequence with several query tokens: a product per key tile, for all the rows that see it.

    Rows are ordered position by position, the group's query heads inside.
    """

    in_order = True

    def __init__(self, batch: AttentionBatch, index: int, first: int, count: int, length: int) -> None:
        device, self.keys = batch.tables.device, batch.tile_keys
        self.tokens = slice(first, first + count)
        self.heads, self._start = batch.heads, length - count
        self._rows = -(-count * batch.heads.group // TILE) * TILE
        tile = torch.arange(-(-length // self.keys), device=device)
        blocks, invalid = _tile_layout(batch, torch.full_like(tile, index), tile, torch.full_like(tile, length))
        self.blocks, self.invalid = blocks.view(len(tile), -1), invalid[:, None, :, None]
        self._tile_rows = [self._see(int(number), device) for number in range(len(tile))]

    def _see(self, tile: int, device: torch.device) -> _TileRows:
        group, before = self.heads.group, tile * self.keys - self._start  # query positions before the tile's first key
        first = max(0, before) * group
        start = first - first % TILE
        partial = min(self._rows, max(start, (before + self.keys - 1) * group))
        if partial == start:
            return _TileRows(start, first, None)
        last_seen = torch.arange(start, partial, device=device) // group - before
        hidden = torch.arange(self.keys, device=device) > last_seen.clamp(min=0)[:, None]
        mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
        return _TileRows(start, first, mask[None])

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        count, heads, width = q.shape
        group = self.heads.group
        rows = q.new_zeros(self.heads.kv, self._rows, width, dtype=torch.float32)
        grouped = q.view(count, self.heads.kv, group, width).transpose(0, 1)
        rows[:, : count * group].view(self.heads.kv, count, group, width).copy_(grouped).mul_(scale)
        out = self._attend(rows, kv)[:, : count * group]
        return out.view(self.heads.kv, count, group, width).transpose(0, 1).reshape(count, heads, width).to(q.dtype)

    def _attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """q [kv_heads, rows, D] -> the same, attended; keys and values are gathered tile by tile."""
        out, total = self._attend_rows(q, kv, 0)
        for number in range(1, len(self._tile_rows)):
            first = self._tile_rows[number].first
            more, log_sum = self._attend_rows(q, kv, number)
            _merge(out[:, first:], total[:, first:], more, log_sum)
        return out

    def _attend_rows(self, q: Tensor, kv: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The rows from the tile's first on: attention within the tile and its log-sum, in agreeing counts."""
        start, first, mask = self._tile_rows[number]
        keys, values = _gather(kv, self.blocks[number], self.invalid[number : number + 1]).squeeze(1)
        outs, log_sums, offset = list[Tensor](), list[Tensor](), 0
        for part in q[:, start:].split(_row_counts(self.keys, q.shape[-1], q.device).cut(q.shape[1] - start), 1):
            shown = None if mask is None or offset >= mask.shape[1] else mask[:, offset : offset + part.shape[1]]
            tile = _attend_tile(part, keys, values, shown)
            outs.append(tile.out)
            log_sums.append(tile.log_sum)
            offset += part.shape[1]
        skip = first - start
        return torch.cat(outs, 1)[:, skip:], torch.cat(log_sums, 1)[:, skip:]


def _tile_layout(batch: AttentionBatch, sequence: Tensor, tile: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """For (sequence, tile) pairs: their blocks, flat, and which keys lie beyond the length [pairs, keys].

    Past a table's end its last column is repeated; those keys are beyond the length.
    """
    device, per_tile = tile.device, batch.tile_keys // batch.block_size
    column = (tile[:, None] * per_tile + torch.arange(per_tile, device=device)).clamp_(max=batch.tables.shape[1] - 1)
    blocks = batch.tables[sequence[:, None], column].flatten()
    invalid = tile[:, None] * batch.tile_keys + torch.arange(batch.tile_keys, device=device) >= length[:, None]
    return blocks, invalid
