"""A ragged batch on the device: what attention kernels read, without a number on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.transfer import upload
from kernels.triton.shapes import SPLIT


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
