"""Paged attention against its reference over a grid of shapes, and the same bits for a row in any batch."""

import random

import pytest
import torch

from kernels import Heads, TorchBackend
from tests.kernels.layouts import Ragged, ragged

BACKEND = TorchBackend(deterministic=True)
WIDTHS, GROUPS, KV_HEADS, BLOCK_SIZES = (8, 64, 80, 96, 128), tuple(range(1, 9)), (1, 2, 3, 5), (1, 4, 16, 24, 64)
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 240, 241, 255, 256, 257, 300, 511, 512, 513, 600)
TOLERANCES = {torch.float32: {"rtol": 2e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 8e-3}}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def grid() -> list[tuple[int, int, int, int]]:
    """Shapes (head size, group, key/value heads, block size): every value of each, few heads where heads are wide."""
    generator = random.Random(0)
    cells = [(WIDTHS[i % 5], GROUPS[i % 8], KV_HEADS[(i + i // 8) % 4], BLOCK_SIZES[i % 5]) for i in range(40)]
    cells = [cell for cell in cells if cell[0] * cell[1] * cell[2] <= 1200]
    return [(*cell[:3], generator.choice(BLOCK_SIZES) if index > 4 else cell[3]) for index, cell in enumerate(cells)]


def test_the_grid_covers_every_value_of_every_axis():
    axes = zip(*grid(), strict=True)
    assert [set(axis) for axis in axes] == [set(WIDTHS), set(GROUPS), set(KV_HEADS), set(BLOCK_SIZES)]


def mixed(seed: int, cell: tuple[int, int, int, int], dtype: torch.dtype, sequences: int = 6) -> Ragged:
    """Decodes, chunks and whole prefills of many lengths in one batch, in random order."""
    width, group, kv_heads, block_size = cell
    generator = random.Random(seed)
    lengths = generator.sample(LENGTHS, sequences)
    counts = [generator.choice([1, 1, min(length, 17), generator.randrange(1, length + 1)]) for length in lengths]
    counts[0] = lengths[0]
    return ragged(seed, Heads(kv_heads, group), width, block_size, counts, lengths, dtype)


@dtypes
@pytest.mark.parametrize("cell", grid(), ids=str)
def test_attention_equals_its_reference_in_mixed_batches(cell, dtype):
    batch = mixed(sum(cell), cell, dtype)
    torch.testing.assert_close(batch.attend(BACKEND), batch.attend_by_reference(), **TOLERANCES[dtype])


@dtypes
@pytest.mark.parametrize("kind", ["decode", "prefill", "chunk"])
def test_attention_equals_its_reference_at_every_length_around_a_tile(dtype, kind):
    for block_size in (16, 24):
        for length in (1, 2, 33, 239, 240, 241, 255, 256, 257, 480, 481, 512, 513):
            count = {"decode": 1, "prefill": length, "chunk": -(-length // 2)}[kind]
            batch = ragged(length, Heads(2, 3), 16, block_size, [count], [length], dtype)
            torch.testing.assert_close(batch.attend(BACKEND), batch.attend_by_reference(), **TOLERANCES[dtype])


def test_attention_of_many_decodes_of_one_length_equals_its_reference():
    for length in (1, 16, 256, 300):
        batch = ragged(length, Heads(3, 3), 64, 16, [1] * 33, [length] * 33)
        torch.testing.assert_close(batch.attend(BACKEND), batch.attend_by_reference(), **TOLERANCES[torch.float32])


def test_attention_sees_only_its_own_blocks_when_sequences_share_a_prefix():
    """Two tables may name the same blocks: a cached prefix."""
    batch = ragged(1, Heads(2, 2), 16, 4, [3, 5], [40, 40])
    batch.tables[1, :8] = batch.tables[0, :8]
    torch.testing.assert_close(batch.attend(BACKEND), batch.attend_by_reference(), **TOLERANCES[torch.float32])


@pytest.mark.parametrize("spread", [30.0, 100.0])
def test_attention_with_large_scores_stays_finite_and_right(spread):
    batch = ragged(3, Heads(2, 4), 64, 16, [1, 300, 20], [600, 300, 280])
    batch.q *= spread
    out = batch.attend(BACKEND)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out, batch.attend_by_reference(), rtol=1e-3, atol=1e-4)


def test_equal_scores_average_the_values():
    batch = ragged(4, Heads(1, 2), 8, 16, [1, 600], [600, 600])
    batch.q.zero_()
    out = batch.attend(BACKEND)
    values = batch.kv[1, batch.tables[1, :38], 0].flatten(0, 1)[:600]
    means = values.cumsum(0) / torch.arange(1, 601)[:, None]
    torch.testing.assert_close(out[1:, 0], means, rtol=1e-4, atol=1e-5)


def test_scaling_does_not_round_the_queries():
    """1 / sqrt(80) is no power of two: scaled in bfloat16 the scores are off by a part in 256."""
    batch = ragged(6, Heads(2, 2), 80, 16, [1, 64, 200], [300, 64, 513], torch.bfloat16)
    batch.q *= 4
    torch.testing.assert_close(batch.attend(BACKEND), batch.attend_by_reference(), rtol=1.6e-2, atol=2e-3)


# -- the same bits ----------------------------------------------------------------------------------------------------


def same(whole: Ragged, out: torch.Tensor, parts: list[tuple[int, int, int]]) -> None:
    """The rows of `parts`, computed as a batch of their own, are the bits that they are in `out`."""
    again = whole.part(parts).attend(BACKEND)
    expected = torch.cat([out[whole.rows(index)][first : first + count] for index, first, count in parts])
    assert torch.equal(again, expected)


@dtypes
@pytest.mark.parametrize("cell", grid()[::2], ids=str)
def test_a_sequence_attends_with_the_same_bits_alone_and_in_any_batch(cell, dtype):
    whole = mixed(sum(cell) + 1, cell, dtype)
    out = whole.attend(BACKEND)
    everything = [(index, 0, count) for index, count in enumerate(whole.counts)]
    for part in everything:
        same(whole, out, [part])
    generator = random.Random(0)
    for size in (2, 3, 5):
        same(whole, out, generator.sample(everything, size))


@dtypes
@pytest.mark.parametrize("cell", grid()[1::4], ids=str)
def test_a_position_attends_with_the_same_bits_by_prefill_chunk_and_decode(cell, dtype):
    width, group, kv_heads, block_size = cell
    length = {8: 600, 64: 530, 80: 300, 96: 270, 128: 520}[width]
    whole = ragged(width, Heads(kv_heads, group), width, block_size, [length], [length], dtype)
    out = whole.attend(BACKEND)
    for chunk in (7, 64, 256):
        for first in range(0, length, chunk):
            same(whole, out, [(0, first, min(chunk, length - first))])
    decodes = [(0, position, 1) for position in range(0, length, 11)]
    same(whole, out, decodes)
    for part in decodes[::7]:
        same(whole, out, [part])


def test_decodes_among_any_number_of_others_keep_their_bits():
    whole = ragged(8, Heads(3, 3), 64, 16, [1] * 40, [1 + 15 * index for index in range(40)])
    out = whole.attend(BACKEND)
    generator = random.Random(3)
    for size in range(1, 41):
        same(whole, out, [(index, 0, 1) for index in generator.sample(range(40), size)])


@pytest.mark.parametrize("group", [5, 6, 7])
def test_one_key_value_head_attends_with_the_same_bits_alone_on_two_threads(threads, group):
    """A single sequence with a single tile and one head is a batch of one product."""
    threads(2)
    whole = ragged(9, Heads(1, group), 64, 16, [1] * 5, [16, 65, 17, 241, 256])
    out = whole.attend(BACKEND)
    for index in range(5):
        same(whole, out, [(index, 0, 1)])


@pytest.mark.parametrize("cell", [(64, 3, 3, 16), (80, 5, 2, 4), (8, 8, 1, 24)], ids=str)
def test_attention_has_the_same_bits_in_any_batch_on_two_threads(threads, cell):
    threads(2)
    whole = mixed(4, cell, torch.float32)
    out = whole.attend(BACKEND)
    for index, count in enumerate(whole.counts):
        same(whole, out, [(index, 0, count)])


def test_what_others_hold_never_reaches_a_row():
    """Neighbours' keys and values become infinite and huge; a row's bits stay."""
    batch = ragged(5, Heads(2, 2), 16, 16, [1, 20, 30], [100, 120, 300])
    out = batch.attend(BACKEND)
    own = batch.tables[1, :8]
    others = [block for block in range(batch.kv.shape[1]) if block not in own.tolist()]
    batch.kv[:, others] = torch.inf
    assert torch.equal(batch.attend(BACKEND)[batch.rows(1)], out[batch.rows(1)])
