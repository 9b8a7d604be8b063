"""Sliding windows and soft-capped scores: equal to the reference, blind to all outside, the same bits in any batch."""

import random
from dataclasses import replace

import pytest
import torch

from kernels import Heads, TorchBackend
from tests.kernels.layouts import Ragged, ragged
from tests.kernels.test_attention import BACKEND, TOLERANCES, dtypes, grid, mixed, same

WINDOWS = (1, 2, 3, 15, 16, 17, 64, 100, 255, 256, 257, 300, 512, 10_000)


def windowed(seed: int, cell: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> Ragged:
    """A mixed batch with a window and, every other time, a soft-cap that bends its scores; NaN before every window."""
    batch = replace(mixed(seed, cell, dtype), window=random.Random(seed).choice(WINDOWS))
    batch.softcap = (None, 1.5)[seed % 2]
    batch.poison_unseen()
    return batch


@dtypes
@pytest.mark.parametrize("cell", grid(), ids=str)
def test_windows_and_soft_caps_equal_their_reference_in_mixed_batches(cell, dtype):
    for seed in (sum(cell), sum(cell) + 1):
        batch = windowed(seed, cell, dtype)
        torch.testing.assert_close(batch.attend(BACKEND), batch.attend_by_reference(), **TOLERANCES[dtype])


@pytest.mark.parametrize("kind", ["decode", "prefill", "chunk"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_equals_its_reference_at_every_length_around_a_tile(window, kind):
    for block_size, length in ((16, 1), (24, 33), (24, 240), (16, 255), (16, 256), (16, 257), (24, 481)):
        count = {"decode": 1, "prefill": length, "chunk": -(-length // 2)}[kind]
        batch = replace(ragged(length, Heads(2, 3), 8, block_size, [count], [length]), window=window)
        batch.poison_unseen()
        expected = batch.attend_by_reference()
        assert bool(expected.isfinite().all())
        torch.testing.assert_close(batch.attend(BACKEND), expected, **TOLERANCES[torch.float32])


def test_a_window_of_one_is_the_value_at_the_position_itself():
    batch = replace(ragged(2, Heads(2, 1), 8, 4, [300], [300]), window=1)
    values = batch.kv[1, batch.tables[0, :75]].transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(batch.attend(BACKEND), values)


def test_a_window_that_holds_everything_is_no_window():
    for seed in range(4):
        batch = mixed(seed, (16, 2, 2, 16), torch.float32)
        assert torch.equal(replace(batch, window=600).attend(BACKEND), batch.attend(BACKEND))


def test_layers_with_different_windows_share_one_batch():
    batch = mixed(3, (16, 2, 2, 16), torch.float32)
    shared = batch.prepare()
    for window in (None, 20, 300, 20, None):
        asked = replace(batch, window=window)
        assert torch.equal(BACKEND.attention(batch.q, batch.kv, shared, batch.scale, window), asked.attend(BACKEND))


@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0])
def test_a_soft_cap_bounds_the_scores(softcap):
    batch = replace(ragged(3, Heads(2, 4), 64, 16, [1, 300, 20], [600, 300, 280]), softcap=softcap)
    batch.q *= 30
    uncapped = replace(batch, softcap=None).attend(BACKEND)
    out = batch.attend(BACKEND)
    torch.testing.assert_close(out, batch.attend_by_reference(), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(out, uncapped, atol=1e-2)


# -- the same bits ----------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("cell", grid()[::2], ids=str)
def test_a_windowed_sequence_attends_with_the_same_bits_alone_and_in_any_batch(cell, dtype):
    whole = windowed(sum(cell) + 1, cell, dtype)
    out = whole.attend(BACKEND)
    everything = [(index, 0, count) for index, count in enumerate(whole.counts)]
    for part in everything:
        same(whole, out, [part])
    same(whole, out, random.Random(0).sample(everything, 3))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [1, 5, 16, 255, 256, 257, 300])
def test_a_windowed_position_attends_with_the_same_bits_by_prefill_chunk_and_decode(window, softcap):
    whole = replace(ragged(window, Heads(2, 3), 8, 16, [600], [600]), window=window, softcap=softcap)
    out = whole.attend(BACKEND)
    for chunk in (7, 64, 256):
        for first in range(0, 600, chunk):
            same(whole, out, [(0, first, min(chunk, 600 - first))])
    decodes = [(0, position, 1) for position in range(0, 600, 11)]
    same(whole, out, decodes)
    for part in decodes[::7]:
        same(whole, out, [part])


def test_a_soft_cap_has_the_same_bits_on_two_threads(threads):
    threads(2)
    whole = windowed(5, (64, 3, 3, 16))
    out = whole.attend(TorchBackend(deterministic=True))
    for index, count in enumerate(whole.counts):
        same(whole, out, [(index, 0, count)])
