# pyright: reportMissingImports=false, reportIndexIssue=false
"""The device's state of all rows, and launching what prepares a step from it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton.batch import Layout, Splits, Tiles
from kernels.triton.shapes import SPLIT, power_of_two
from kernels.triton.steps import advance, apply_differences, lay_out, open_entries, spread

RECORDS = 256  # of differences, a program
TOKENS = 64  # of a mixed step, a program
ONE = {"num_warps": 4, "num_stages": 1}


@dataclass(frozen=True, slots=True)
class State:
    """By row, the last for padding: tables [R + 1, blocks], lengths and last_tokens [R + 1]; places [most]: int32."""

    tables: Tensor
    lengths: Tensor
    last_tokens: Tensor
    places: Tensor
    block_size: int
    padding_block: int

    @classmethod
    def make(cls, rows: int, columns: int, block_size: int, padding_block: int, device: torch.device) -> "State":
        tables = torch.full((rows + 1, columns), padding_block, dtype=torch.int32, device=device)
        lengths, last_tokens = torch.zeros(2, rows + 1, dtype=torch.int32, device=device)
        places = torch.full((rows,), rows, dtype=torch.int32, device=device)
        return cls(tables, lengths, last_tokens, places, block_size, padding_block)

    @property
    def padding_row(self) -> int:
        return len(self.lengths) - 1

    def apply(self, changes: Tensor, most: int) -> None:
        """Carry out at most `most` records of changes int32 [4 + 3 most] (see steps.apply_differences)."""
        apply_differences[(-(-most // RECORDS),)](
            changes, self.tables, self.lengths, self.last_tokens, self.places, self.tables.stride(0),
            block=RECORDS, **ONE,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One step's tokens and entries on the device, int32 all: buffers that a graph reads and writes again and again.

    ids, positions, blocks, offsets, token_rows [T]; rows, ends [S]; starts [S + 1]. In a decode step T = S.
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
        sizes = (*[tokens] * 5, entries, entries, entries + 1)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))

    def layout(self, state: State) -> Layout:
        return Layout(state.tables, self.rows, self.starts, self.ends)

    def advance(self, state: State) -> None:
        """A decode step of the first S places."""
        count = len(self.rows)
        advance[(1,)](
            state.places, state.tables, state.lengths, state.last_tokens,
            self.ids, self.positions, self.blocks, self.offsets, self.rows, self.starts, self.ends,
            count, state.padding_row, state.padding_block, state.tables.stride(0),
            block_size=state.block_size, most=power_of_two(count), **ONE,
        )  # fmt: skip

    def open(self, state: State, entries: Tensor, sent: Tensor) -> None:
        """A mixed step: entries int32 [4, S] and ids int32 [T], as steps.open_entries and steps.spread have them."""
        count, tokens = len(self.rows), len(self.ids)
        assert entries.shape == (4, count)
        assert entries.is_contiguous()
        most = power_of_two(count)
        open_entries[(1,)](
            entries, state.lengths, self.rows, self.starts, self.ends, count, state.padding_row, most=most, **ONE
        )
        spread[(-(-tokens // TOKENS),)](
            entries, sent, self.starts, state.tables, state.last_tokens,
            self.ids, self.positions, self.token_rows, self.blocks, self.offsets,
            tokens, count, state.padding_row, state.padding_block, state.tables.stride(0),
            block=TOKENS, block_size=state.block_size, most=most, **ONE,
        )  # fmt: skip

    def lay_out(self, splits: Splits, tiles: Tiles, tile_tokens: int, window: int | None) -> None:
        """Fill in the starts of splits and tiles, for layers with this window."""
        count = len(self.rows)
        lay_out[(1,)](
            self.starts, self.ends, splits.starts, tiles.starts, count, window or 0, SPLIT, tile_tokens,
            most=power_of_two(count), windowed=window is not None, **ONE,
        )  # fmt: skip
