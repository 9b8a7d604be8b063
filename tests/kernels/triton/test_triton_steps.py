"""Steps prepared from the device's state, against the same in Python; then a whole attention on what they lay out."""

import random

import pytest
import torch

from kernels import Heads, State, Step
from kernels.plain_resident import PlainResident
from kernels.triton import attention
from kernels.triton.attention import Scoring, Workspace
from kernels.triton.batch import Layout, Splits, Tiles, lay_out_batch, split_count
from kernels.triton.shapes import SPLIT
from kernels.triton.state import TritonResident
from tests.kernels.layouts import ragged

CPU = torch.device("cpu")
PADDING_BLOCK, BLOCK_SIZE, ROWS = 99, 4, 5
RESIDENT = TritonResident()


def made(state: State, *, blocks=(), rows=(), places=(), most=300) -> tuple[torch.Tensor, torch.Tensor]:
    """Differences as the host sends them, with rubbish behind them."""
    at, width = state.addresses, state.tables.shape[1]
    records = [(at.tables + row * width + index, block) for row, index, block in blocks]
    for row, length, token in rows:
        records += [(at.lengths + row, length), (at.last_tokens + row, token)]
    records += [(at.places + place, row) for place, row in places]
    rubbish = [(7, 7)] * (most - len(records))
    return torch.tensor([len(records)], dtype=torch.int32), torch.tensor(records + rubbish, dtype=torch.int32)


def fresh(columns: int = 6) -> State:
    state = State.make(ROWS, columns, BLOCK_SIZE, CPU)
    state.clear(PADDING_BLOCK)
    return state


@pytest.fixture
def state() -> State:
    return fresh()


def test_differences_change_what_they_name_and_nothing_else(state):
    RESIDENT.apply(state, *made(state, blocks=[(1, 0, 7), (1, 5, 8), (4, 2, 9)], rows=[(1, 20, 3)], places=[(3, 2)]))
    expected = torch.full((ROWS + 1, 6), PADDING_BLOCK, dtype=torch.int32)
    expected[1, 0], expected[1, 5], expected[4, 2] = 7, 8, 9
    assert torch.equal(state.tables, expected)
    assert state.lengths.tolist() == [0, 20, 0, 0, 0, 0]
    assert state.last_tokens.tolist() == [0, 3, 0, 0, 0, 0]
    assert state.places.tolist() == [5, 5, 5, 2, 5, 5]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 500])
def test_differences_are_those_that_are_counted_and_the_same_in_plain_torch(count):
    """More than a program takes, too; none change nothing."""
    one, other = fresh(100), fresh(100)
    addresses = torch.randperm(one.addresses.end)[:600]
    records = torch.stack((addresses, torch.arange(600) + 1000), 1).int()
    RESIDENT.apply(one, torch.tensor([count], dtype=torch.int32), records)
    PlainResident().apply(other, torch.tensor([count], dtype=torch.int32), records)
    assert torch.equal(one.memory[:-1], other.memory[:-1])
    assert bool((one.memory[addresses[:count].long()] >= 1000).all())
    assert int((one.memory >= 1000).sum()) == count


@pytest.mark.parametrize("seed", range(3))
def test_triton_prepares_the_steps_that_plain_torch_prepares(seed):
    """Random rows with places of nobody between them; then entries of all kinds, and room for more."""
    source = random.Random(seed)
    states, steps = [fresh(), fresh()], list[Step]()
    blocks = [(row, index, source.randrange(90)) for row in range(ROWS) for index in range(6)]
    rows = [(row, source.randrange(20), source.randrange(1000)) for row in range(ROWS)]
    places = list(zip(source.sample(range(ROWS), 3), source.sample(range(ROWS), 3), strict=True))
    count = source.randint(1, 3)
    counts = [source.choice([1, 1, 3, 5]) for _ in range(count)]
    fed = [int(tokens == 1 and source.random() < 0.5) for tokens in counts]
    firsts, empty = [source.randrange(18) for _ in range(count)], [0] * (4 - count)
    chosen = source.sample(range(ROWS), count)
    entries = torch.tensor([chosen + [ROWS] * len(empty), firsts + empty, counts + empty, fed + empty]).int()
    for state, resident in zip(states, (RESIDENT, PlainResident()), strict=True):
        resident.apply(state, *made(state, blocks=blocks, rows=rows, places=places))
        steps += [Step.make(5, 5, CPU), Step.make(17, 4, CPU)]
        resident.advance(state, steps[-2])
        resident.open(state, steps[-1], entries, torch.arange(100, 117, dtype=torch.int32))
    assert torch.equal(states[0].memory[:-1], states[1].memory[:-1])
    for one, other in zip(steps[:2], steps[2:], strict=True):
        for name in Step.__dataclass_fields__:
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_a_decode_step_feeds_each_places_last_token_and_counts_it(state):
    changes = made(state, blocks=[(1, 5, 8), (4, 2, 9)], rows=[(1, 20, 3), (4, 11, 6)], places=[(0, 4), (2, 1)])
    RESIDENT.apply(state, *changes)
    step = Step.make(3, 3, CPU)
    for more in (0, 1):
        RESIDENT.advance(state, step)
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
    RESIDENT.open(state, step, entries, sent)
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
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)]).int()
    layout = Layout(starts, starts, starts, torch.tensor(ends).int())
    splits, tiles = torch.full((2, 7), -1, dtype=torch.int32)
    lay_out_batch(layout, splits, tiles, 16, window)
    parts = [split_count(end, window) if count == 1 else 0 for count, end in zip(counts, ends, strict=True)]
    assert splits.diff().tolist() == parts
    assert tiles.diff().tolist() == [0, 2, 0, 0, 0, 2]
    assert (splits[0], tiles[0]) == (0, 0)


@pytest.mark.parametrize("window", [None, 20])
def test_attention_of_a_padded_step_needs_no_number_of_the_host(window):
    """Grids and workspaces have room for more than there is; places of nobody are left alone."""
    batch = ragged(2, Heads(2, 2), 16, 16, [1, 21, 1], [70, 40, 9])
    batch.window = window
    state = State.make(3, batch.tables.shape[1], 16, CPU)
    state.clear(0)
    state.tables[:3] = batch.tables.int()
    entries = torch.tensor([[0, 1, 2, 3], [69, 19, 8, 0], [1, 21, 1, 0], [0] * 4], dtype=torch.int32)
    step = Step.make(30, 4, CPU)
    RESIDENT.open(state, step, entries, torch.zeros(30, dtype=torch.int32))
    q = torch.cat((batch.q, torch.full((7, *batch.q.shape[1:]), float("nan"))))
    out = torch.full_like(q, -5.0)
    scoring = Scoring(batch.scale, None, window)
    tokens = attention.tile_tokens(q, batch.kv, invariant=False)
    splits, tiles = Splits(torch.zeros(5, dtype=torch.int32), 7), Tiles(torch.zeros(5, dtype=torch.int32), 4)
    layout = Layout(state.tables, step.rows, step.starts, step.ends)
    lay_out_batch(layout, splits.starts, tiles.starts, tokens, window)
    workspace = Workspace.make(splits.capacity, q.shape[1], q.shape[2], CPU)
    attention.attend_decodes(q, batch.kv, out, layout, splits, scoring, workspace)
    attention.attend_chunks(q, batch.kv, out, layout, tiles, scoring, invariant=False)
    torch.testing.assert_close(out[:23], batch.attend_by_reference(), rtol=2e-5, atol=2e-6)
    assert bool((out[23:] == -5.0).all())
