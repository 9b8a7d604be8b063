# pyright: reportMissingImports=false, reportIndexIssue=false
"""Launching what prepares a step from the device's state of all rows: see kernels/resident.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.resident import State, Step
from kernels.triton.batch import split_count
from kernels.triton.sampling import Lottery
from kernels.triton.shapes import ONE, power_of_two
from kernels.triton.steps import advance, apply_differences, open_entries, spread

RECORDS = 256  # of differences, a program
TOKENS = 64  # of a mixed step, a program


class TritonResident:
    """See `Resident`."""

    def apply(self, state: State, count: Tensor, records: Tensor) -> None:
        apply_differences[(-(-len(records) // RECORDS),)](state.memory, count, records, block=RECORDS, **ONE)

    def advance(self, state: State, step: Step) -> None:
        count = len(step.rows)
        advance[(1,)](
            state.places, state.tables, state.lengths, state.last_tokens,
            step.ids, step.positions, step.blocks, step.offsets, step.rows, step.starts, step.ends,
            count, state.padding_row, state.padding_block, state.tables.stride(0),
            block_size=state.block_size, most=power_of_two(count), **ONE,
        )  # fmt: skip

    def open(self, state: State, step: Step, entries: Tensor, sent: Tensor) -> None:
        count, tokens = len(step.rows), len(step.ids)
        assert entries.shape == (4, count)
        assert entries.is_contiguous()
        most = power_of_two(count)
        open_entries[(1,)](
            entries, state.lengths, step.rows, step.starts, step.ends, count, state.padding_row, most=most, **ONE
        )
        spread[(-(-tokens // TOKENS),)](
            entries, sent, step.starts, state.tables, state.last_tokens,
            step.ids, step.positions, step.token_rows, step.blocks, step.offsets,
            tokens, count, state.padding_row, state.padding_block, state.tables.stride(0),
            block=TOKENS, block_size=state.block_size, most=most, **ONE,
        )  # fmt: skip

    def splits(self, lengths: Sequence[int]) -> int:
        return sum(split_count(length, None) for length in lengths)

    def lottery(self, most: int, vocab: int, device: torch.device) -> Lottery:
        lottery = Lottery(most, vocab, device)
        lottery.reserve_filters()
        return lottery
