"""Decodes that begin with the same blocks read them once, and get the bits that they get alone."""

import random
import time
from dataclasses import replace

import pytest
import torch

from kernels import Heads
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import Library, load
from tests.kernels.layouts import NAN, Ragged, ragged

TOLERANCES = {torch.float32: {"rtol": 2e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 8e-3}}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
Family = list[tuple[int, int]]  # (leader, positions that a sequence has in common with it), by sequence


@pytest.fixture(scope="module")
def kernels() -> CpuBackend:
    found = load()
    if not isinstance(found, Library):
        pytest.skip(found.reason)
    return CpuBackend(found, deterministic=True, threads=2)


def share(batch: Ragged, family: Family) -> Ragged:
    """Give sequences the leading blocks of their leaders, as many as are whole; nobody may read those they had."""
    size = batch.kv.shape[3]
    for index, (leader, positions) in enumerate(family):
        blocks = min(positions, batch.lengths[index] - 1, batch.lengths[leader] - 1) // size
        if index != leader:
            batch.kv[:, batch.tables[index, :blocks]] = NAN
            batch.tables[index, :blocks] = batch.tables[leader, :blocks]
    return batch


def check(kernels: CpuBackend, batch: Ragged, dtype: torch.dtype) -> None:
    """The reference's results, and for each sequence the bits that it gets alone."""
    out = batch.attend(kernels)
    torch.testing.assert_close(out, batch.attend_by_reference(), **TOLERANCES[dtype])
    for index, count in enumerate(batch.counts):
        assert torch.equal(batch.part([(index, 0, count)]).attend(kernels), out[batch.rows(index)]), index


@dtypes
@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 64, 128, 300])
def test_decodes_with_a_common_beginning_keep_their_bits(kernels, dtype, block_size):
    lengths = [513, 400, 401, 385, 129, 128, 700, 300]
    for width, heads, common in ((64, Heads(2, 2), 384), (80, Heads(3, 5), 300), (128, Heads(1, 1), 128)):
        batch = ragged(block_size, heads, width, block_size, [1] * len(lengths), lengths, dtype)
        check(kernels, share(batch, [(0, common)] * len(lengths)), dtype)


@dtypes
def test_families_within_families_and_strangers_keep_their_bits(kernels, dtype):
    family = [(0, 0), (0, 256), (0, 512), (0, 512), (4, 0), (4, 640), (0, 130), (7, 0), (0, 512), (4, 128)]
    for seed in range(4):
        generator = random.Random(seed)
        lengths = [generator.randrange(520, 900) for _ in family]
        counts = [generator.choice((1, 1, 1, 1, 30)) for _ in family]
        batch = ragged(seed, Heads(2, 3), 64, 16, counts, lengths, dtype)
        check(kernels, share(batch, family), dtype)


def test_more_sequences_than_are_taken_together_keep_their_bits(kernels):
    count = 210
    batch = ragged(1, Heads(1, 2), 16, 16, [1] * count, [260 + index % 40 for index in range(count)])
    check(kernels, share(batch, [(0, 256)] * count), torch.float32)


@pytest.mark.parametrize("window", [1, 100, 300])
def test_common_beginnings_behind_a_window_are_not_read(kernels, window):
    batch = share(ragged(2, Heads(2, 2), 64, 16, [1] * 4, [500] * 4), [(0, 384)] * 4)
    batch.window = window
    batch.poison_unseen()
    check(kernels, batch, torch.float32)


def test_scores_with_a_cap_keep_their_bits_over_a_common_beginning(kernels):
    batch = share(ragged(3, Heads(2, 2), 64, 16, [1] * 5, [300] * 5, torch.bfloat16), [(0, 256)] * 5)
    batch.softcap = 2.0
    check(kernels, batch, torch.bfloat16)


def test_a_common_beginning_is_computed_in_less_time_than_strangers(kernels):
    """Measured on one thread, by its own processor time: the ratio is above two."""
    strangers = ragged(4, Heads(8, 2), 128, 16, [1] * 16, [1500] * 16, torch.bfloat16)
    shared = share(replace(strangers, kv=strangers.kv.clone(), tables=strangers.tables.clone()), [(0, 1408)] * 16)
    alone = CpuBackend(kernels.library, deterministic=True, threads=1)
    times = _seconds(alone, strangers, shared)
    assert times[1] < times[0] / 1.3, times


@pytest.mark.parametrize("last", [False, True])
def test_one_that_shares_little_does_not_take_the_others_apart(kernels, last):
    """Wherever it sorts: sixteen share all but their ends, one the first tile only."""
    whole = ragged(5, Heads(8, 2), 128, 16, [1] * 17, [1500] * 17, torch.bfloat16)
    whole.tables[16, 8:94] = whole.tables[16, 8:94].sort(descending=last).values
    together, odd = (
        share(replace(whole, kv=whole.kv.clone(), tables=whole.tables.clone()), [(0, 1408)] * 16 + [last_one])
        for last_one in ((16, 0), (0, 128))
    )
    assert bool(odd.tables[16, 8] > odd.tables[0, 8]) == last
    alone = CpuBackend(kernels.library, deterministic=True, threads=1)
    times = _seconds(alone, together, odd)
    assert times[1] < 1.3 * times[0], times


def test_few_heads_on_many_threads_keep_their_bits(kernels):
    many = CpuBackend(kernels.library, deterministic=True, threads=4)
    batch = share(ragged(6, Heads(1, 4), 64, 16, [1] * 9, [700] * 9, torch.bfloat16), [(0, 640)] * 9)
    check(many, batch, torch.bfloat16)


def _seconds(kernels: CpuBackend, *batches: Ragged) -> list[float]:
    """Processor time of the best of some calls of each, by turns: what else the machine does meets them alike."""
    return [min(times) for times in zip(*([_time(kernels, batch) for batch in batches] for _ in range(7)), strict=True)]


def _time(kernels: CpuBackend, batch: Ragged) -> float:
    began = time.thread_time()
    batch.attend(kernels)
    return time.thread_time() - began
