"""C++ attention against its reference over a grid of shapes, and the same bits for a row in any batch."""

import random
from dataclasses import replace

import pytest
import torch

from kernels import Heads
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import Library, load
from tests.kernels.cpu.conftest import every_level
from tests.kernels.layouts import NAN, Ragged, ragged

WIDTHS, GROUPS, KV_HEADS = (8, 64, 65, 80, 96, 128, 256), tuple(range(1, 10)), (1, 2, 3, 5)
BLOCK_SIZES, WINDOWS = (1, 4, 16, 24, 64, 300), (None, 1, 17, 128, 129, 300)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 513)
TOLERANCES = {torch.float32: {"rtol": 2e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 8e-3}}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
Cell = tuple[int, int, int, int, int | None]


@pytest.fixture(scope="module")
def library() -> Library:
    found = load()
    if not isinstance(found, Library):
        pytest.skip(found.reason)
    return found


def backend(library: Library, threads: int = 1) -> CpuBackend:
    return CpuBackend(library, deterministic=True, threads=threads)


def cells(count: int = 54) -> list[Cell]:
    """Shapes (head size, group, key/value heads, block size, window) that have every value of every axis."""
    axes = (WIDTHS, GROUPS, KV_HEADS, BLOCK_SIZES, WINDOWS)
    generator = random.Random(0)
    shuffled = [generator.sample(axis, len(axis)) for axis in axes]
    return [tuple(axis[i % len(axis)] for axis in shuffled) for i in range(count)]  # type: ignore[return-value]


def mixed(seed: int, cell: Cell, dtype: torch.dtype, sequences: int = 4) -> Ragged:
    """Decodes, chunks and whole prefills of many lengths in one batch; NaN wherever nothing may be read."""
    width, group, kv_heads, block_size, window = cell
    generator = random.Random(seed)
    lengths = generator.sample(LENGTHS, sequences)
    counts = [generator.choice([1, 1, min(length, 17), generator.randrange(1, length + 1)]) for length in lengths]
    batch = ragged(seed, Heads(kv_heads, group), width, block_size, counts, lengths, dtype)
    batch = replace(batch, window=window, softcap=1.5 if seed % 3 == 0 else None)
    if window is not None:
        batch.poison_unseen()
    return batch


def test_the_cells_cover_every_value_of_every_axis():
    axes = zip(*cells(), strict=True)
    assert [set(axis) for axis in axes] == [set(a) for a in (WIDTHS, GROUPS, KV_HEADS, BLOCK_SIZES, WINDOWS)]


@dtypes
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_compiled_attention_equals_its_reference(library, cell, dtype):
    batch = mixed(sum(x or 0 for x in cell), cell, dtype)
    torch.testing.assert_close(batch.attend(backend(library)), batch.attend_by_reference(), **TOLERANCES[dtype])


@dtypes
@pytest.mark.parametrize("length", [1, 127, 128, 129, 1023, 4097])
def test_compiled_attention_of_long_contexts_equals_its_reference(library, length, dtype):
    batch = ragged(length, Heads(2, 2), 64, 16, [1, min(length, 9)], [length, length], dtype)
    torch.testing.assert_close(batch.attend(backend(library)), batch.attend_by_reference(), **TOLERANCES[dtype])


@every_level
@dtypes
def test_attention_equals_its_reference_and_keeps_its_bits_on_every_level(cpu, dtype):
    for number, cell in enumerate(cells()[::9]):
        batch = mixed(number, cell, dtype)
        out = batch.attend(cpu)
        torch.testing.assert_close(out, batch.attend_by_reference(), **TOLERANCES[dtype])
        for index, count in enumerate(batch.counts):
            same(cpu, batch, out, [(index, count // 2, count - count // 2)])
            same(cpu, batch, out, [(index, count - 1, 1)])


@pytest.mark.parametrize("spread", [30.0, 100.0])
def test_compiled_attention_with_large_scores_stays_finite_and_right(library, spread):
    batch = ragged(3, Heads(2, 4), 64, 16, [1, 200, 20], [500, 200, 280])
    batch.q *= spread
    out = batch.attend(backend(library))
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out, batch.attend_by_reference(), rtol=1e-3, atol=1e-4)


@dtypes
def test_compiled_attention_averages_equal_values_to_themselves(library, dtype):
    batch = ragged(4, Heads(1, 2), 80, 16, [1, 300], [300, 300], dtype)
    batch.kv[1] = 0.7109375  # a bfloat16
    torch.testing.assert_close(batch.attend(backend(library)), torch.full_like(batch.q, 0.7109375), rtol=1e-6, atol=0)


def test_a_query_or_key_that_is_not_finite_shows_in_all_later_rows(library):
    for part, dtype in ((0, torch.float32), (1, torch.bfloat16)):
        batch = ragged(6, Heads(1, 3), 64, 16, [300], [300], dtype)
        batch.kv[part, batch.tables[0, 10], 0, 3, 5] = NAN  # position 163
        out = batch.attend(backend(library))
        assert bool(out[163:].isnan().flatten(1).any(1).all())
        assert bool(out[:160].isfinite().all())


# -- the same bits ----------------------------------------------------------------------------------------------------


def same(kernels: CpuBackend, whole: Ragged, out: torch.Tensor, parts: list[tuple[int, int, int]]) -> None:
    """The rows of `parts`, computed as a batch of their own, are the bits that they are in `out`."""
    expected = torch.cat([out[whole.rows(index)][first : first + count] for index, first, count in parts])
    assert torch.equal(whole.part(parts).attend(kernels), expected)


@dtypes
@pytest.mark.parametrize("cell", cells()[::5], ids=str)
def test_compiled_attention_has_the_same_bits_alone_and_in_any_batch(library, cell, dtype):
    whole, kernels = mixed(sum(x or 0 for x in cell) + 1, cell, dtype), backend(library)
    out = whole.attend(kernels)
    everything = [(index, 0, count) for index, count in enumerate(whole.counts)]
    for part in everything:
        same(kernels, whole, out, [part])
    same(kernels, whole, out, everything[::-1])


@dtypes
@pytest.mark.parametrize("cell", cells()[2::9], ids=str)
def test_compiled_attention_has_the_same_bits_by_prefill_chunk_and_decode(library, cell, dtype):
    width, group, kv_heads, block_size, window = cell
    whole = ragged(width, Heads(kv_heads, group), width, block_size, [400], [400], dtype)
    whole, kernels = replace(whole, window=window), backend(library)
    out = whole.attend(kernels)
    for chunk in (7, 64, 128):
        for first in range(0, 400, chunk):
            same(kernels, whole, out, [(0, first, min(chunk, 400 - first))])
    decodes = [(0, position, 1) for position in range(0, 400, 9)]
    same(kernels, whole, out, decodes)
    for part in decodes[::5]:
        same(kernels, whole, out, [part])


@dtypes
def test_compiled_attention_has_the_same_bits_on_any_number_of_threads(library, dtype):
    """More threads cut one long context into more tasks, whose results somebody merges."""
    whole = ragged(8, Heads(2, 3), 64, 16, [1, 5, 140, 1], [1500, 700, 140, 3], dtype)
    out = whole.attend(backend(library, 1))
    for threads in (2, 3, 8):
        kernels = backend(library, threads)
        for _ in range(3):
            assert torch.equal(whole.attend(kernels), out)
        same(kernels, whole, out, [(0, 0, 1)])


def test_what_others_hold_never_reaches_a_row_of_compiled_attention(library):
    batch, kernels = ragged(5, Heads(2, 2), 16, 16, [1, 20, 30], [100, 120, 300]), backend(library)
    out = batch.attend(kernels)
    own = batch.tables[1, :8].tolist()
    batch.kv[:, [block for block in range(batch.kv.shape[1]) if block not in own]] = torch.inf
    assert torch.equal(batch.attend(kernels)[batch.rows(1)], out[batch.rows(1)])


@pytest.mark.parametrize("fault", ["dtype", "width", "table", "tokens"])
def test_compiled_attention_refuses_what_would_read_elsewhere(library, fault):
    batch = ragged(1, Heads(2, 2), 16, 16, [3, 1], [40, 20])
    if fault == "dtype":
        batch.q = batch.q.bfloat16()
    elif fault == "width":
        batch.q = batch.q[..., :8]
    elif fault == "table":
        batch.tables = batch.tables[:, :1]
    else:
        batch.q = batch.q[1:]
    with pytest.raises(AssertionError):
        batch.attend(backend(library))
