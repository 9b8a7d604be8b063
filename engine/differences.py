"""What the host tells the device before a step: words of the state that differ from what the device has."""

import math
import struct
from array import array

import torch

from engine.sampling.filters import min_p_floor
from engine.sampling.rows import FLOAT_MAX
from engine.sequence import Sequence
from kernels import State


class Differences:
    """Gathers (address, word) pairs for a state's memory. `taken` of them are the device's once they are sent."""

    def __init__(self, state: State, vocab_size: int) -> None:
        self._at, self._columns = state.addresses, state.tables.shape[1]
        self._nobody, self._vocab_size = state.padding_row, vocab_size
        self._records = array("i")
        self._places = list[int]()
        self.forget()

    def forget(self) -> None:
        """What the device has is not known any more: what was gathered is dropped, and all places are told again.

        Tables of rows that go on the scheduler tells again; nobody else's matter.
        """
        del self._records[:]
        self._places = [-1] * (self._nobody + 1)

    def clear(self) -> None:
        """The state was cleared: nobody is in any place."""
        del self._records[:]
        self._places = [self._nobody] * (self._nobody + 1)

    def take(self) -> "array[int]":
        """What was gathered since the last time."""
        taken, self._records = self._records, array("i")
        return taken

    def open(self, sequence: Sequence) -> None:
        """What the lottery has to know of a row, see kernels.resident.Parameters."""
        at, row, sampling = self._at, sequence.row, sequence.request.sampling
        temperature = 0.0 if sequence.greedy else min(sampling.temperature, FLOAT_MAX)
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        min_floor = _min_floor(sampling.min_p)
        self._write(at.temperatures + row, struct.pack("=f", temperature))
        self._write(at.top_ks + row, struct.pack("=i", top_k))
        self._write(at.min_floors + row, struct.pack("=f", min_floor))
        self._write(at.top_ps + 2 * row, struct.pack("=d", sampling.top_p))
        self._write(at.seeds + 2 * row, struct.pack("=Q", sequence.seed))

    def write_tables(self, blocks: list[tuple[int, int, int]]) -> None:
        """Table entries (row, index, block)."""
        for row, index, block in blocks:
            self._records.extend((self._at.tables + row * self._columns + index, block))

    def place(self, rows: list[int], bucket: int) -> None:
        """These rows are in the first places of a decode batch, nobody in the others of its bucket."""
        wanted = rows + [self._nobody] * (bucket - len(rows))
        if wanted == self._places[:bucket]:
            return
        for place, (row, before) in enumerate(zip(wanted, self._places, strict=False)):
            if row != before:
                self._records.extend((self._at.places + place, row))
        self._places[:bucket] = wanted

    def _write(self, address: int, packed: bytes) -> None:
        for number, word in enumerate(array("i", packed)):
            self._records.extend((address + number, word))


def _min_floor(min_p: float) -> float:
    """By the same logarithm as the sampler's."""
    return min_p_floor(torch.tensor([min_p], dtype=torch.float64)).item() if min_p > 0 else -math.inf
