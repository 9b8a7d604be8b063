"""What a device keeps of running sequences from step to step, and what a step is prepared from without the host.

Everything that a step needs of a sequence lies in one memory of int32 words, by row: so whatever the host has to tell
is a list of (address, word), and a step needs no number of the host's beside. Such a step can be captured in a graph.
`Resident` is what a backend does with it; kernels/plain_resident.py says in plain torch what it means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, Heads

ALIGNED = 4  # words: what begins at a multiple of 16 bytes is loaded 16 bytes at once


@dataclass(frozen=True, slots=True)
class Parameters:
    """What rows ask of the lottery, on the device, by row; the last row is for padding.

    temperatures float32 (0: greedy), top_ks int32 (0: off), top_ps float64 (1: off), min_floors float32 (log of min_p,
    -inf: off), seeds int64, last_tokens int32: the token that a row drew last.
    """

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_floors: Tensor
    seeds: Tensor
    last_tokens: Tensor


class Addresses(NamedTuple):
    """Where each part of a state's memory begins, in words; `top_ps` and `seeds` have two words a row."""

    top_ps: int
    seeds: int
    temperatures: int
    top_ks: int
    min_floors: int
    lengths: int
    last_tokens: int
    places: int
    tables: int
    end: int


@dataclass(slots=True)
class State:
    """Of R rows and one more for padding: tables [R + 1, columns] of blocks, lengths (positions whose keys are written
    or about to be) and `places`: which row is in which place of a decode batch. int32; `memory` holds them all, and
    ends with a word that takes what is meant for nobody.
    """

    memory: Tensor
    tables: Tensor
    lengths: Tensor
    places: Tensor
    parameters: Parameters
    addresses: Addresses
    block_size: int
    padding_block: int = 0

    @classmethod
    def make(cls, rows: int, columns: int, block_size: int, device: torch.device) -> "State":
        count = rows + 1
        words = [2 * count, 2 * count, *[count] * 6, count * columns]
        addresses = Addresses(0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in words))
        memory = torch.zeros(addresses.end + 1, dtype=torch.int32, device=device)
        parts = [memory[start:][:size] for start, size in zip(addresses, words, strict=False)]
        top_ps, seeds, temperatures, top_ks, min_floors, lengths, last_tokens, places, tables = parts
        parameters = Parameters(
            temperatures.view(torch.float32), top_ks, top_ps.view(torch.float64), min_floors.view(torch.float32),
            seeds.view(torch.int64), last_tokens,
        )  # fmt: skip
        return cls(memory, tables.view(count, columns), lengths, places, parameters, addresses, block_size)

    def clear(self, padding_block: int) -> None:
        """Nobody is anywhere, and all tables are of the padding block."""
        self.padding_block = padding_block
        self.memory.zero_()
        self.places.fill_(self.padding_row)
        self.tables.fill_(padding_block)

    @property
    def padding_row(self) -> int:
        return len(self.lengths) - 1

    @property
    def last_tokens(self) -> Tensor:
        return self.parameters.last_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One step's tokens and entries on the device: buffers that a graph reads and writes again and again.

    ids, positions, blocks, offsets, token_rows int64 [T]; rows, ends int32 [S]; starts int32 [S + 1]: entry i has the
    tokens starts[i] … starts[i + 1] - 1, the last positions of its ends[i] (0: nobody). In a decode step T = S, and
    token_rows is not used.
    """

    ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    token_rows: Tensor
    rows: Tensor
    ends: Tensor
    starts: Tensor

    @classmethod
    def make(cls, tokens: int, entries: int, device: torch.device) -> "Step":
        sizes = [tokens] * 5 + [entries, entries, entries + 1]
        kinds = [torch.int64] * 5 + [torch.int32] * 3
        pairs = zip(sizes, kinds, strict=True)
        return cls(*(torch.zeros(size, dtype=kind, device=device) for size, kind in pairs))


@dataclass(slots=True)
class ResidentBatch:
    """A step's batch for attention, without a number on the host: for one run of a forward pass.

    `splits` (see `Resident.splits`) has room for its entries with one token; those of a step of `decodes` have no more.
    Who needs numbers after all, on a CPU, takes `on_host`.
    """

    state: State
    step: Step
    heads: Heads
    decodes: bool
    splits: int
    _host: AttentionBatch | None = None

    @property
    def on_host(self) -> AttentionBatch:
        """Those who are there, which are the first entries and tokens. Waits for the device."""
        if self._host is None:
            starts, ends = self.step.starts.tolist(), [end for end in self.step.ends.tolist() if end]
            counts = [end - start for start, end in pairwise(starts)][: len(ends)]
            tables = self.state.tables[self.step.rows[: len(ends)].long()].long()
            self._host = AttentionBatch(counts, ends, tables, self.state.block_size, self.heads)
        return self._host


class Lottery(Protocol):
    """Draws tokens for rows of logits, whatever each of them asks for."""

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        parameters: Parameters,
        out: Tensor,
        broken: Tensor,
        *,
        random: bool,
        filtered: bool,
    ) -> None:
        """Write the tokens of logits [B, vocabulary] to out [B] and to their rows' last tokens; broken [B] as int32.

        rows [B] and positions [B] (of the new tokens) are int32. What the host knows picks the kernels: `random` if any
        row draws, `filtered` if any has top-k, top-p or min-p. Tokens do not depend on that.
        """
        ...


class Resident(Protocol):
    """Nothing here waits for the device, or asks it for a number."""

    def apply(self, state: State, count: Tensor, records: Tensor) -> None:
        """Write the first count [1] of records [most, 2]: addresses in the state's memory, and words; int32.

        No two records have one address: they are carried out in any order.
        """
        ...

    def advance(self, state: State, step: Step) -> None:
        """A decode step of the first S places: each feeds its row's last token, and is a position longer."""
        ...

    def open(self, state: State, step: Step, entries: Tensor, sent: Tensor) -> None:
        """A mixed step of entries int32 [4, S]: row, first position, number of tokens, fed.

        Ids are those in sent int32 [T], but for fed entries, whose one token is their row's last. Unused entries come
        last and have the padding row and no tokens; tokens past the entries' are padding.
        """
        ...

    def splits(self, lengths: Sequence[int]) -> int:
        """Into how many parts attention may cut the keys of decodes of these lengths: what `ResidentBatch` asks for."""
        ...

    def lottery(self, most: int, vocab: int, device: torch.device) -> Lottery:
        """For up to `most` rows over `vocab` tokens; takes all of its memory at once."""
        ...
