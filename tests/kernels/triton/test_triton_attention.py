"""Paged attention on the interpreter against the reference: layouts, windows, soft-caps, and who may change a bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import Heads
from kernels.triton.backend import TritonBackend
from kernels.triton.shapes import SPLIT
from tests.kernels.layouts import Ragged, ragged

FAST, INVARIANT = TritonBackend(deterministic=False), TritonBackend(deterministic=True)
TOLERANCES = {torch.float32: {"rtol": 2e-5, "atol": 2e-6}, torch.float16: {"rtol": 4e-3, "atol": 2e-3}}
both = pytest.mark.parametrize("backend", [FAST, INVARIANT], ids=["fast", "invariant"])


def check(batch: Ragged, backend: TritonBackend) -> torch.Tensor:
    out = batch.attend(backend)
    torch.testing.assert_close(out, batch.attend_by_reference(), **TOLERANCES[batch.q.dtype])
    return out


@both
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("group", "kv_heads", "width", "block_size"),
    [(1, 2, 64, 16), (2, 1, 128, 16), (3, 2, 80, 4), (5, 1, 16, 24), (8, 1, 96, 64), (16, 1, 32, 1)],
)
def test_triton_attention_equals_its_reference_in_mixed_batches(backend, dtype, group, kv_heads, width, block_size):
    check(ragged(group, Heads(kv_heads, group), width, block_size, [1, 9, 1, 33], [65, 9, 1, 70], dtype), backend)


@both
@pytest.mark.parametrize("length", [1, 2, 16, 63, 64, 65, 128, 129])
def test_triton_attention_equals_its_reference_around_a_tile(backend, length):
    batch = ragged(length, Heads(1, 2), 16, 16, [length, 1, -(-length // 2)], [length] * 3)
    check(batch, backend)


@both
def test_triton_attention_equals_its_reference_over_several_splits(backend):
    for length in (SPLIT, SPLIT + 1, 2 * SPLIT + 70):
        check(ragged(length, Heads(1, 2), 16, 16, [1, 3], [length, length]), backend)


@both
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [1, 2, 16, 40, 64, 65, 10_000])
def test_triton_windows_and_soft_caps_equal_their_reference(backend, window, softcap):
    """What no query's window reaches is NaN."""
    batch = ragged(window, Heads(1, 3), 16, 16, [1, 75, 20, 1], [130, 75, 150, 30])
    batch = replace(batch, window=window, softcap=softcap)
    batch.poison_unseen()
    check(batch, backend)


@both
def test_triton_windows_begin_within_any_split(backend):
    for window in (5, SPLIT - 1, SPLIT, SPLIT + 8):
        batch = replace(ragged(3, Heads(1, 2), 16, 16, [1, 5], [SPLIT + 9, 2 * SPLIT + 3]), window=window)
        batch.poison_unseen()
        check(batch, backend)


@both
def test_triton_attention_with_large_scores_stays_finite_and_right(backend):
    batch = ragged(3, Heads(1, 4), 64, 16, [1, 20], [100, 80])
    batch.q *= 100
    out = batch.attend(backend)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out, batch.attend_by_reference(), rtol=1e-3, atol=1e-4)


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card's matrix units treat all rows alike. The interpreter's float32 products do not, its float64 ones do."""
    product = np.matmul

    def matmul(a: np.ndarray, b: np.ndarray, **more: object) -> np.ndarray:
        return product(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)

    monkeypatch.setattr(np, "matmul", matmul)


def test_triton_decodes_have_the_same_bits_alone_and_in_any_batch():
    whole = ragged(8, Heads(2, 3), 64, 16, [1] * 5, [1, 40, 65, SPLIT + 20, 130])
    out = whole.attend(FAST)
    for chosen in ([0], [3], [2, 4], [4, 3, 1]):
        again = whole.part([(index, 0, 1) for index in chosen]).attend(FAST)
        assert torch.equal(again, out[chosen])


@pytest.mark.parametrize("window", [None, 50])
def test_triton_positions_have_the_same_bits_by_prefill_chunk_and_decode(rows_alike, window):
    length = SPLIT + 30
    whole = replace(ragged(7, Heads(1, 3), 16, 16, [40], [length]), window=window)
    out = whole.attend(INVARIANT)
    for first, count in ((0, 7), (7, 33), (3, 2)):
        assert torch.equal(whole.part([(0, first, count)]).attend(INVARIANT), out[first : first + count])
    for first in (0, 9, 10, 11, 39):
        assert torch.equal(whole.part([(0, first, 1)]).attend(INVARIANT), out[first : first + 1])
