"""Paged attention in plain torch, in one order of accumulation over absolute key positions.

Keys are taken in tiles at fixed absolute positions. Each (query row, tile) product has the same shape whoever asks, and
tiles are merged one by one, in order (flash-decoding's split, Dao et al. 2023, with a split that only the position
decides). So a row's result is the same, bit for bit, from a decode step, from a chunk and from a whole prefill.

With a sliding window a row begins at the tile that holds the first key it sees: that too only its position decides.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows import TILE
from kernels.tiles import Paging, Scoring, Span, attend_tile, gather, hide, merge, row_counts
from kernels.transfer import upload

PAIRS = 64  # (sequence, key tile) pairs whose keys and values a decode gathers at once: bounds its memory


@dataclass(frozen=True, slots=True)
class Heads:
    """How query heads share key/value heads: `kv` groups of `group` query heads."""

    kv: int
    group: int


class AttentionBatch:
    """A ragged batch, prepared once per step and window and used by all layers that have it.

    Sequence i owns the next `query_lengths[i]` tokens, which are the last positions of its `lengths[i]`;
    `tables` [S, max_blocks] are its blocks (int64, on the cache's device).
    """

    def __init__(
        self, query_lengths: list[int], lengths: list[int], tables: Tensor, block_size: int, heads: Heads
    ) -> None:
        self.query_lengths, self.lengths = query_lengths, lengths
        self.tables, self.block_size, self.heads = tables, block_size, heads
        self._parts: dict[int, list[_Decodes | _Chunk]] = {}

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def spans(self) -> tuple[Tensor, Tensor]:
        """Query lengths and lengths [S], int32 in the host's memory, for kernels that take the batch as it is."""
        counts, lengths = torch.tensor([self.query_lengths, self.lengths], dtype=torch.int32)
        return counts, lengths

    def parts(self, window: int | None) -> "list[_Decodes | _Chunk]":
        """The batch cut into its decodes and its chunks, laid out for a window (None: all that came before)."""
        reach = self.longest if window is None else min(window, self.longest)
        if reach not in self._parts:
            self._parts[reach] = self._lay_out(reach)
        return self._parts[reach]

    def _lay_out(self, window: int) -> "list[_Decodes | _Chunk]":
        paging = Paging.of(self.tables, self.block_size)
        parts: list[_Decodes | _Chunk] = []
        first, decodes = 0, list[_Decode]()
        for index, (count, length) in enumerate(zip(self.query_lengths, self.lengths, strict=True)):
            if count == 1:
                decodes.append(_Decode(max(0, length - window), length, first, index))
            else:
                parts.append(_Chunk(paging, self.heads, _Queries(index, first, count, length, window)))
            first += count
        if decodes:
            parts.append(_Decodes(paging, self.heads, decodes))
        return parts


def paged_attention(
    q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """q [T, heads, D], kv [2, blocks, kv_heads, block_size, D] -> [T, heads, D] in q's dtype."""
    parts, scoring = batch.parts(window), Scoring(scale, softcap)
    if len(parts) == 1 and parts[0].in_order:
        return parts[0].attend(q, kv, scoring)
    out = torch.empty_like(q)
    for part in parts:
        out[part.tokens] = part.attend(q[part.tokens], kv, scoring)
    return out


class _Decode(NamedTuple):
    """One query token, which sees the keys first_key … length - 1."""

    first_key: int
    length: int
    token: int
    sequence: int


class _Pairs(NamedTuple):
    """Consecutive key tiles of the decodes that have them: `having[j]` sequences for the j-th, one pair each."""

    having: list[int]
    blocks: Tensor
    unseen: Tensor
    mask: Tensor


class _Decodes:
    """All sequences with one query token: every (sequence, key tile) pair is one entry of a batched product.

    Sequences are sorted by falling number of tiles that they see, so that those with a j-th tile are the first ones.
    """

    def __init__(self, paging: Paging, heads: Heads, decodes: list[_Decode]) -> None:
        self._heads, self._keys = heads, paging.tile_keys
        tiles = {decode: paging.tile_range(decode.first_key, decode.length) for decode in decodes}
        decodes = sorted(decodes, key=lambda decode: -len(tiles[decode]))
        self.tokens = upload([decode.token for decode in decodes], paging.tables.device)
        self.in_order = [decode.token for decode in decodes] == list(range(len(decodes)))
        most = len(tiles[decodes[0]])
        having = [[decode for decode in decodes if len(tiles[decode]) > number] for number in range(most)]
        pairs = [[(decode, tiles[decode][number]) for decode in having[number]] for number in range(most)]
        at_once = max(1, PAIRS // len(decodes))
        self._pairs = [_pair(paging, heads, pairs[first : first + at_once]) for first in range(0, most, at_once)]
        self._many = most > 1

    def attend(self, q: Tensor, kv: Tensor, scoring: Scoring) -> Tensor:
        count, heads, width = q.shape
        group = self._heads.group
        rows = row_counts(self._keys, width, q.device).padded(group)
        padded = q.new_zeros(count, self._heads.kv, rows, width, dtype=torch.float32)
        grouped = q.view(count, self._heads.kv, group, width)
        padded[:, :, :group].copy_(grouped).mul_(scoring.scale)  # scaled after it is float32
        return self._attend(padded, kv, scoring)[:, :, :group].reshape(count, heads, width).to(q.dtype)

    def _attend(self, q: Tensor, kv: Tensor, scoring: Scoring) -> Tensor:
        """q [S, kv_heads, rows, D] in order of falling number of tiles -> the same, attended."""
        tiles = [tile for pairs in self._pairs for tile in self._attend_pairs(q, kv, pairs, scoring)]
        out, total = tiles[0]
        for more, log_sum in tiles[1:]:
            merge(out[: len(more)], total[: len(more)], more, log_sum)
        return out

    def _attend_pairs(self, q: Tensor, kv: Tensor, pairs: _Pairs, scoring: Scoring) -> list[tuple[Tensor, Tensor]]:
        """For each tile, attention within it of the sequences that have it, and their log-sums (if tiles are many)."""
        keys, values = gather(kv, pairs.blocks, pairs.unseen).flatten(1, 2)
        having = pairs.having
        queries = q[: having[0]] if len(having) == 1 else torch.cat([q[:count] for count in having])
        mask = pairs.mask.expand(-1, q.shape[2], -1)
        tile = attend_tile(queries.flatten(0, 1), keys, values, mask, scoring.softcap)
        outs = tile.out.view(queries.shape)
        if not self._many:
            return [(outs, outs)]
        log_sums = tile.log_sum.view(*queries.shape[:3], 1)
        return list(zip(outs.split(having), log_sums.split(having), strict=True))


def _pair(paging: Paging, heads: Heads, tiles: list[list[tuple[_Decode, int]]]) -> _Pairs:
    facts = [(d.sequence, tile, d.first_key, d.length) for pairs in tiles for d, tile in pairs]
    sequence, tile, first, length = upload(facts, paging.tables.device).T
    blocks, unseen = paging.locate(sequence, tile, Span(first, length))
    mask = hide(unseen).repeat_interleave(heads.kv, 0)[:, None]
    return _Pairs([len(pairs) for pairs in tiles], blocks, unseen[:, None, :, None], mask)


@dataclass(frozen=True, slots=True)
class _Queries:
    """The tokens of a chunk: the last `count` positions of `length`, each of which sees `window` keys, its own too."""

    sequence: int
    first_token: int
    count: int
    length: int
    window: int

    @property
    def start(self) -> int:
        return self.length - self.count

    @property
    def first_key(self) -> int:
        return max(0, self.start + 1 - self.window)


class _TileRows(NamedTuple):
    """The query rows first … end - 1 see something of a key tile; start … stop - 1 are those in whole TILEs."""

    first: int
    end: int
    start: int
    stop: int
    mask: Tensor | None  # added to the scores of the rows from `start` on that do not see the whole tile


class _Chunk:
    """One sequence with several query tokens: a product per key tile, for all the rows that see it.

    Rows are ordered position by position, the group's query heads inside.
    """

    in_order = True

    def __init__(self, paging: Paging, heads: Heads, queries: _Queries) -> None:
        device, self._keys = paging.tables.device, paging.tile_keys
        self.tokens = slice(queries.first_token, queries.first_token + queries.count)
        self._heads, self._queries = heads, queries
        self._rows = -(-queries.count * heads.group // TILE) * TILE
        numbers = paging.tile_range(queries.first_key, queries.length)
        tile = upload(numbers, device)
        seen = Span(torch.full_like(tile, queries.first_key), torch.full_like(tile, queries.length))
        blocks, unseen = paging.locate(torch.full_like(tile, queries.sequence), tile, seen)
        self._blocks, self._unseen = blocks.view(len(tile), -1), unseen[:, None, :, None]
        self._tile_rows = [self._see(number, device) for number in numbers]

    def _see(self, tile: int, device: torch.device) -> _TileRows:
        group, queries, keys = self._heads.group, self._queries, self._keys
        before = tile * keys - queries.start  # query positions before the tile's first key
        leaving = before + queries.window  # the first query position that does not see that key any more
        first, end = max(0, before) * group, min(queries.count, leaving + keys - 1) * group
        start, stop = first - first % TILE, -(-end // TILE) * TILE
        windowed = leaving < queries.count
        partial = stop if windowed else min(stop, max(start, (before + keys - 1) * group))
        if partial == start:
            return _TileRows(first, end, start, stop, None)
        last_seen = (torch.arange(start, partial, device=device) // group - before)[:, None]
        key = torch.arange(keys, device=device)
        hidden = key > last_seen.clamp(min=0)
        if windowed:
            hidden |= key <= last_seen - queries.window
        return _TileRows(first, end, start, stop, hide(hidden)[None])

    def attend(self, q: Tensor, kv: Tensor, scoring: Scoring) -> Tensor:
        count, heads, width = q.shape
        group = self._heads.group
        rows = q.new_zeros(self._heads.kv, self._rows, width, dtype=torch.float32)
        grouped = q.view(count, self._heads.kv, group, width).transpose(0, 1)
        rows[:, : count * group].view(self._heads.kv, count, group, width).copy_(grouped).mul_(scoring.scale)
        out = self._attend(rows, kv, scoring.softcap)[:, : count * group]
        return out.view(self._heads.kv, count, group, width).transpose(0, 1).reshape(count, heads, width).to(q.dtype)

    def _attend(self, q: Tensor, kv: Tensor, softcap: float | None) -> Tensor:
        """q [kv_heads, rows, D] -> the same, attended; keys and values are gathered tile by tile."""
        out, total = torch.empty_like(q), torch.empty_like(q[..., :1])
        begun = 0  # rows that have seen a tile; the first one that a row sees is not merged with anything
        for number, (first, end, *_) in enumerate(self._tile_rows):
            more, log_sum = self._attend_rows(q, kv, number, softcap)
            if first < begun:
                merge(out[:, first:begun], total[:, first:begun], more[:, : begun - first], log_sum[:, : begun - first])
            out[:, begun:end], total[:, begun:end] = more[:, begun - first :], log_sum[:, begun - first :]
            begun = end
        return out

    def _attend_rows(self, q: Tensor, kv: Tensor, number: int, softcap: float | None) -> tuple[Tensor, Tensor]:
        """The rows that see the tile: attention within it and its log-sum, computed in agreeing counts."""
        first, end, start, stop, mask = self._tile_rows[number]
        keys, values = gather(kv, self._blocks[number], self._unseen[number : number + 1]).squeeze(1)
        outs, log_sums, offset = list[Tensor](), list[Tensor](), 0
        for part in q[:, start:stop].split(row_counts(self._keys, q.shape[-1], q.device).cut(stop - start), 1):
            shown = None if mask is None or offset >= mask.shape[1] else mask[:, offset : offset + part.shape[1]]
            tile = attend_tile(part, keys, values, shown, softcap)
            outs.append(tile.out)
            log_sums.append(tile.log_sum)
            offset += part.shape[1]
        seeing = slice(first - start, end - start)
        return torch.cat(outs, 1)[:, seeing], torch.cat(log_sums, 1)[:, seeing]
