"""Steps prepared from the device's state, against the same in Python; then a whole attention on what they lay out."""

import pytest
import torch

from kernels import Heads
from kernels.triton import attention
from kernels.triton.attention import Scoring, Workspace
from kernels.triton.batch import Splits, Tiles, split_count
from kernels.triton.shapes import SPLIT
from kernels.triton.state import State, Step
from tests.kernels.layouts import ragged

CPU = torch.device("cpu")
PADDING_BLOCK, BLOCK_SIZE, ROWS = 99, 4, 5


def made(*, blocks=(), rows=(), places=(), most=300) -> torch.Tensor:
    """A buffer of differences, with rubbish behind its records."""
    records = [*blocks, *rows, *((*pair, 0) for pair in places)]
    header = [len(blocks), len(rows), len(places), 0]
    numbers = [*header, *(number for record in records for number in record)]
    return torch.tensor(numbers + [7] * (4 + 3 * most - len(numbers)), dtype=torch.int32)


@pytest.fixture
def state() -> State:
    return State.make(ROWS, 6, BLOCK_SIZE, PADDING_BLOCK, CPU)


def test_differences_change_what_they_name_and_nothing_else(state):
    state.last_tokens[2] = 55
    state.apply(
        made(blocks=[(1, 0, 7), (1, 5, 8), (4, 2, 9)], rows=[(1, 20, 3), (2, 9, -1)], places=[(0, 1), (3, 2)]), 300
    )
    expected = torch.full((ROWS + 1, 6), PADDING_BLOCK, dtype=torch.int32)
    expected[1, 0], expected[1, 5], expected[4, 2] = 7, 8, 9
    assert torch.equal(state.tables, expected)
    assert state.lengths.tolist() == [0, 20, 9, 0, 0, 0]
    assert state.last_tokens.tolist() == [0, 3, 55, 0, 0, 0]
    assert state.places.tolist() == [1, 5, 5, 2, 5]


def test_more_differences_than_a_program_takes_are_all_carried_out():
    state = State.make(ROWS, 100, BLOCK_SIZE, PADDING_BLOCK, CPU)
    blocks = [(row, index, row * 100 + index) for row in range(4) for index in range(100)]
    state.apply(made(blocks=blocks, rows=[(0, 5, 6)], most=600), 600)
    assert torch.equal(state.tables[:4], torch.arange(400, dtype=torch.int32).view(4, 100))
    assert (state.lengths[0], state.last_tokens[0]) == (5, 6)


def test_no_difference_changes_nothing(state):
    before = [part.clone() for part in (state.tables, state.lengths, state.last_tokens, state.places)]
    state.apply(made(), 300)
    after = (state.tables, state.lengths, state.last_tokens, state.places)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_decode_step_feeds_each_places_last_token_and_counts_it(state):
    state.apply(made(blocks=[(1, 5, 8), (4, 2, 9)], rows=[(1, 20, 3), (4, 11, 6)], places=[(0, 4), (2, 1)]), 300)
    step = Step.make(3, 3, CPU)
    for more in (0, 1):
        step.advance(state)
        assert step.ids.tolist() == [6, 0, 3]
        assert step.positions.tolist() == [11 + more, 0, 20 + more]
        assert step.blocks.tolist() == [9 if not more else PADDING_BLOCK, PADDING_BLOCK, 8]
        assert step.offsets.tolist() == [(11 + more) % 4, 0, (20 + more) % 4]
        assert step.rows.tolist() == [4, ROWS, 1]
        assert step.ends.tolist() == [12 + more, 0, 21 + more]
        assert step.starts.tolist() == [0, 1, 2, 3]
    assert state.lengths.tolist() == [0, 22, 0, 0, 13, 0]


def test_a_mixed_step_spreads_its_entries_over_its_tokens(state):
    state.tables[:5] = torch.arange(30, dtype=torch.int32).view(5, 6)
    state.last_tokens[3] = 77
    entries = torch.tensor([[2, 3, 0, ROWS], [5, 9, 0, 0], [4, 1, 2, 0], [0, 1, 0, 0]], dtype=torch.int32)
    sent = torch.tensor([10, 11, 12, 13, -1, 20, 21, -1, -1], dtype=torch.int32)
    step = Step.make(9, 4, CPU)
    step.open(state, entries, sent)
    assert step.ids.tolist() == [10, 11, 12, 13, 77, 20, 21, 0, 0]
    assert step.positions.tolist() == [5, 6, 7, 8, 9, 0, 1, 0, 0]
    assert step.token_rows.tolist() == [2, 2, 2, 2, 3, 0, 0, ROWS, ROWS]
    assert step.blocks.tolist() == [13, 13, 13, 14, 20, 0, 0, PADDING_BLOCK, PADDING_BLOCK]
    assert step.offsets.tolist() == [1, 2, 3, 0, 1, 0, 1, 0, 0]
    assert (step.rows.tolist(), step.ends.tolist()) == ([2, 3, 0, ROWS], [9, 10, 2, 0])
    assert step.starts.tolist() == [0, 4, 5, 7, 7]
    assert state.lengths.tolist() == [2, 0, 9, 10, 0, 0]


@pytest.mark.parametrize("window", [None, 1, 40, 300])
def test_splits_and_tiles_are_counted_on_the_device(window):
    counts, ends = [1, 30, 0, 1, 1, 17], [5, 30, 0, 2 * SPLIT + 1, SPLIT + 20, 900]
    step = Step.make(60, 6, CPU)
    step.starts.copy_(torch.tensor([0, *torch.tensor(counts).cumsum(0)]))
    step.ends.copy_(torch.tensor(ends))
    splits, tiles = torch.full((2, 7), -1, dtype=torch.int32)
    step.lay_out(Splits(splits, 99), Tiles(tiles, 99), 16, window)
    parts = [split_count(end, window) if count == 1 else 0 for count, end in zip(counts, ends, strict=True)]
    assert splits.diff().tolist() == parts
    assert tiles.diff().tolist() == [0, 2, 0, 0, 0, 2]
    assert (splits[0], tiles[0]) == (0, 0)


@pytest.mark.parametrize("window", [None, 20])
def test_attention_of_a_padded_step_needs_no_number_of_the_host(window):
    """Grids and workspaces have room for more than there is; places of nobody are left alone."""
    batch = ragged(2, Heads(2, 2), 16, 16, [1, 21, 1], [70, 40, 9])
    batch.window = window
    state = State.make(3, batch.tables.shape[1], 16, 0, CPU)
    state.tables[:3] = batch.tables.int()
    entries = torch.tensor([[0, 1, 2, 3], [69, 19, 8, 0], [1, 21, 1, 0], [0] * 4], dtype=torch.int32)
    step = Step.make(30, 4, CPU)
    step.open(state, entries, torch.zeros(30, dtype=torch.int32))
    q = torch.cat((batch.q, torch.full((7, *batch.q.shape[1:]), float("nan"))))
    out = torch.full_like(q, -5.0)
    scoring = Scoring(batch.scale, None, window)
    tokens = attention.tile_tokens(q, batch.kv, invariant=False)
    splits, tiles = Splits(torch.zeros(5, dtype=torch.int32), 7), Tiles(torch.zeros(5, dtype=torch.int32), 4)
    step.lay_out(splits, tiles, tokens, window)
    layout, workspace = step.layout(state), Workspace.make(splits.capacity, q.shape[1], q.shape[2], CPU)
    attention.attend_decodes(q, batch.kv, out, layout, splits, scoring, workspace)
    attention.attend_chunks(q, batch.kv, out, layout, tiles, scoring, invariant=False)
    torch.testing.assert_close(out[:23], batch.attend_by_reference(), rtol=2e-5, atol=2e-6)
    assert bool((out[23:] == -5.0).all())
