# pyright: reportMissingImports=false, reportIndexIssue=false
"""A ragged batch on the device: what attention kernels read, without a number on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.resident import ResidentBatch
from kernels.transfer import upload
from kernels.triton.shapes import ONE, SPLIT, power_of_two
from kernels.triton.steps import lay_out


@dataclass(frozen=True, slots=True)
class Layout:
    """Entry i owns tokens starts[i] … starts[i + 1] - 1, the last positions of its lengths[i]; rows[i] of `tables`.

    starts int32 [S + 1], rows and lengths int32 [S], tables int32 or int64 [any, blocks]. `steps.lay_out` makes all
    but the tables inside a graph. The capacities are numbers of the host's and may be too large, never too small.
    """

    tables: Tensor
    rows: Tensor
    starts: Tensor
    lengths: Tensor

    @property
    def count(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class Splits:
    """The key splits of the entries with one query: starts int32 [S + 1]; there is room for `capacity` in all."""

    starts: Tensor
    capacity: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The query tiles of the entries with several queries: starts int32 [S + 1], at most `capacity` in all."""

    starts: Tensor
    capacity: int


class HostBatch:
    """The device's view of an AttentionBatch, whose lengths the host knows: one copy a step, one more a window."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self._splits, self._tiles = dict[int, Splits](), dict[int, Tiles]()
        count = len(batch.lengths)
        starts = sums(batch.query_lengths)
        packed = self._send([*range(count), *batch.lengths, *starts])
        self.layout = Layout(batch.tables, packed[:count], packed[2 * count :], packed[count : 2 * count])

    def _send(self, numbers: list[int]) -> Tensor:
        return upload(numbers, self.batch.tables.device, torch.int32)

    def splits(self, window: int | None) -> Splits | None:
        """None if no entry has one query."""
        if 1 not in self.batch.query_lengths:
            return None
        if (window or 0) not in self._splits:
            pairs = zip(self.batch.query_lengths, self.batch.lengths, strict=True)
            starts = sums([split_count(length, window) if count == 1 else 0 for count, length in pairs])
            self._splits[window or 0] = Splits(self._send(starts), starts[-1])
        return self._splits[window or 0]

    def tiles(self, tokens: int) -> Tiles | None:
        """Tiles of so many tokens; None if no entry has several queries."""
        if max(self.batch.query_lengths) == 1:
            return None
        if tokens not in self._tiles:
            starts = sums([-(-count // tokens) if count > 1 else 0 for count in self.batch.query_lengths])
            self._tiles[tokens] = Tiles(self._send(starts), starts[-1])
        return self._tiles[tokens]


class DeviceBatch:
    """A ResidentBatch, whose lengths only the device knows: it lays out what attention asks for, once a window."""

    def __init__(self, batch: ResidentBatch) -> None:
        self.batch, step = batch, batch.step
        self._splits, self._tiles = dict[int, Splits](), dict[int, Tiles]()
        self.layout = Layout(batch.state.tables, step.rows, step.starts, step.ends)

    def splits(self, window: int | None) -> Splits | None:
        if (window or 0) not in self._splits:
            self._splits[window or 0] = self._lay_out(window, 1)[0]
        return self._splits[window or 0]

    def tiles(self, tokens: int) -> Tiles | None:
        """Room for the most that there can be; None in a step of decodes."""
        if self.batch.decodes:
            return None
        if tokens not in self._tiles:
            self._tiles[tokens] = self._lay_out(None, tokens)[1]
        return self._tiles[tokens]

    def _lay_out(self, window: int | None, tile_tokens: int) -> tuple[Splits, Tiles]:
        count, tokens = self.layout.count, len(self.batch.step.ids)
        splits, tiles = torch.empty(2, count + 1, dtype=torch.int32, device=self.layout.starts.device)
        lay_out_batch(self.layout, splits, tiles, tile_tokens, window)
        # Each entry with several tokens leaves at most one tile that is not full.
        return Splits(splits, self.batch.splits), Tiles(tiles, tokens // tile_tokens + min(count, tokens // 2))


def lay_out_batch(layout: Layout, splits: Tensor, tiles: Tensor, tile_tokens: int, window: int | None) -> None:
    """Fill in the starts of splits and tiles, for layers with this window."""
    lay_out[(1,)](
        layout.starts, layout.lengths, splits, tiles, layout.count, window or 0, SPLIT, tile_tokens,
        most=power_of_two(layout.count), windowed=window is not None, **ONE,
    )  # fmt: skip


def split_count(length: int, window: int | None) -> int:
    """How many splits the last of `length` positions sees something of."""
    first = 0 if window is None else max(0, length - window)
    return -(-length // SPLIT) - first // SPLIT


def sums(numbers: list[int]) -> list[int]:
    """0 and the running sums."""
    running = [0]
    for number in numbers:
        running.append(running[-1] + number)
    return running
