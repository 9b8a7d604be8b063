"""Every other operation of the backend against its reference, and the same bits for a row in any batch."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import TorchBackend, reference, select
from kernels.rows import cancelling

TOLERANCES = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}
ROWS = (1, 2, 3, 5, 8, 9, 13, 16, 17, 31, 32, 37, 64, 100, 128, 129, 300)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
gates = pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
modes = pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "stock"])


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_keep_their_bits(operation, x: Tensor) -> None:
    """operation(x) row by row, in batches of many sizes and in another order, is operation(x)."""
    whole, generator = operation(x), random.Random(0)
    for size in ROWS:
        if size > len(x):
            break
        chosen = torch.tensor(generator.sample(range(len(x)), size))
        assert torch.equal(operation(x[chosen]), whole[chosen]), f"in a batch of {size}"


# -- linear -----------------------------------------------------------------------------------------------------------


@modes
@dtypes
@pytest.mark.parametrize("shape", [(1, 8), (7, 13), (32, 56), (96, 33), (576, 960), (1536, 576), (16, 17_000)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_equals_its_reference(deterministic, dtype, shape, biased):
    inner, outputs = shape
    weight = random_tensor(outputs, inner, dtype=dtype, seed=1) / inner**0.5
    bias = random_tensor(outputs, dtype=dtype, seed=2) if biased else None
    product = TorchBackend(deterministic=deterministic).prepare_linear(weight.clone(), bias)
    for rows in (1, 2, 7, 16, 19, 33, 130):
        x = random_tensor(rows, inner, dtype=dtype, seed=rows)
        out = product(x)
        assert out.dtype == dtype
        torch.testing.assert_close(out, reference.linear(x, weight, bias), **TOLERANCES[dtype])


@dtypes
@pytest.mark.parametrize("shape", [(7, 13), (32, 56), (33, 96), (576, 960), (1536, 576), (16, 17_000)], ids=str)
@pytest.mark.parametrize("content", ["random", "cancelling"])
def test_a_row_of_linear_has_the_same_bits_in_any_batch(dtype, shape, content):
    inner, outputs = shape
    x, weight = cancelling(300, outputs, inner, dtype, torch.device("cpu"))
    if content == "random":
        x, weight = random_tensor(300, inner, dtype=dtype), random_tensor(outputs, inner, dtype=dtype, seed=5)
    product = select(deterministic=True).prepare_linear(weight, random_tensor(outputs, dtype=dtype))
    assert_rows_keep_their_bits(product, x)


@dtypes
@pytest.mark.parametrize("shape", [(32, 56), (576, 960)], ids=str)
def test_a_row_of_linear_has_the_same_bits_on_two_threads(threads, dtype, shape):
    threads(2)
    x, weight = cancelling(300, shape[1], shape[0], dtype, torch.device("cpu"))
    assert_rows_keep_their_bits(select(deterministic=True).prepare_linear(weight), x)


def test_linear_of_more_rows_than_were_ever_probed_keeps_its_bits():
    weight, x = random_tensor(40, 24), random_tensor(2600, 24)
    product = select(deterministic=True).prepare_linear(weight)
    whole = product(x)
    for first in (0, 1, 1023, 1024, 1500, 2599):
        assert torch.equal(product(x[first : first + 1])[0], whole[first])


def test_no_rows_at_all_are_an_empty_product():
    assert select(deterministic=True).prepare_linear(random_tensor(5, 8))(torch.zeros(0, 8)).shape == (0, 5)


# -- norms, rope, gates -----------------------------------------------------------------------------------------------


@modes
@dtypes
@pytest.mark.parametrize("shape", [(5, 8), (3, 33), (16, 576), (4, 9, 64), (6, 3, 80), (2, 1, 128)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_rms_norm_equals_its_reference(deterministic, dtype, shape, eps):
    backend = TorchBackend(deterministic=deterministic)
    weight = random_tensor(shape[-1], dtype=dtype, seed=1)
    for scale in (1e-3, 1.0, 100.0):
        x = random_tensor(*shape, dtype=dtype) * scale
        out = backend.rms_norm(x, weight, eps)
        assert out.dtype == dtype
        torch.testing.assert_close(out, reference.rms_norm(x, weight, eps), **TOLERANCES[dtype])


@dtypes
def test_rms_norm_of_zeros_is_zero(dtype):
    x = torch.zeros(3, 32, dtype=dtype)
    assert torch.equal(select(deterministic=True).rms_norm(x, torch.ones(32, dtype=dtype), 1e-6), x)


@dtypes
@pytest.mark.parametrize("width", [8, 33, 64, 576])
def test_a_row_of_rms_norm_has_the_same_bits_in_any_batch(dtype, width):
    backend, weight = select(deterministic=True), random_tensor(width, dtype=dtype, seed=1)
    assert_rows_keep_their_bits(
        lambda x: backend.rms_norm(x, weight, 1e-5), random_tensor(300, width, dtype=dtype, seed=2)
    )


def doubled(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The tables as Backend.rope takes them."""
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


@dtypes
@pytest.mark.parametrize("heads", [1, 3, 9])
@pytest.mark.parametrize("width", [2, 8, 64, 80, 96, 128])
def test_rope_equals_its_reference_on_slices_too(dtype, heads, width):
    angles = random_tensor(13, width // 2, seed=3) * 50
    x = random_tensor(13, heads + 2, width, dtype=dtype)[:, 1 : heads + 1]
    out = select(deterministic=True).rope(x, *doubled(angles.cos(), angles.sin()))
    assert out.dtype == dtype
    torch.testing.assert_close(out, reference.rope(x, angles.cos(), angles.sin()), **TOLERANCES[dtype])


@dtypes
def test_rope_keeps_the_angle_between_positions(dtype):
    """q·k after rotation depends only on how far apart they are: the point of it."""
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 64, 2) / 64)
    q, k = random_tensor(1, 1, 64, seed=1).expand(40, -1, -1), random_tensor(1, 1, 64, seed=2).expand(40, -1, -1)
    angles = torch.outer(torch.arange(40.0), frequencies)
    tables = doubled(angles.cos(), angles.sin())
    backend = select(deterministic=True)
    products = torch.einsum("ihd,jhd->ij", backend.rope(q, *tables), backend.rope(k, *tables))
    for distance in (0, 1, 7, 20):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-3, atol=1e-3)


@dtypes
def test_a_row_of_rope_has_the_same_bits_in_any_batch(dtype):
    angles = random_tensor(300, 32, seed=3) * 50
    cos, sin = doubled(angles.cos(), angles.sin())
    backend, x = select(deterministic=True), random_tensor(300, 3, 64, dtype=dtype)
    whole = backend.rope(x, cos, sin)
    for size in ROWS:
        chosen = torch.randperm(300, generator=torch.Generator().manual_seed(size))[:size]
        assert torch.equal(backend.rope(x[chosen], cos[chosen], sin[chosen]), whole[chosen])


@modes
@dtypes
@gates
@pytest.mark.parametrize("width", [1, 7, 56, 1536])
def test_a_gate_equals_its_reference(deterministic, dtype, gate, width):
    x = random_tensor(9, 2 * width, dtype=dtype) * 4
    out = getattr(TorchBackend(deterministic=deterministic), gate)(x.clone())
    assert out.dtype == dtype
    torch.testing.assert_close(out, getattr(reference, gate)(x), **TOLERANCES[dtype])


def test_the_gates_are_those_of_torch():
    x = random_tensor(9, 2 * 56) * 4
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(reference.silu_mul(x), F.silu(gate) * up, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reference.gelu_mul(x), F.gelu(gate, approximate="tanh") * up, rtol=1e-5, atol=1e-6)


@modes
@dtypes
@gates
def test_huge_gates_are_finite(deterministic, dtype, gate):
    values = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4]], dtype=dtype)
    out = getattr(TorchBackend(deterministic=deterministic), gate)(torch.cat((values, torch.ones_like(values)), 1))
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 1e4]], dtype=dtype)
    torch.testing.assert_close(out, expected)


@dtypes
@gates
@pytest.mark.parametrize("width", [1, 7, 56, 1000])
def test_a_row_of_a_gate_has_the_same_bits_in_any_batch(dtype, gate, width):
    operation = getattr(select(deterministic=True), gate)
    assert_rows_keep_their_bits(lambda x: operation(x.clone()), random_tensor(300, 2 * width, dtype=dtype))


@dtypes
@pytest.mark.parametrize("block_size", [1, 4, 24])
def test_store_kv_writes_these_places_and_no_others(dtype, block_size):
    kv = torch.full((2, 7, 3, block_size, 8), float("nan"), dtype=dtype)
    expected = kv.clone()
    places = torch.randperm(7 * block_size, generator=torch.Generator().manual_seed(0))[: min(7 * block_size, 11)]
    blocks, offsets = places // block_size, places % block_size
    new = random_tensor(len(places), 2, 3, 8, dtype=dtype)
    select(deterministic=True).store_kv(kv, new, blocks, offsets)
    reference.store_kv(expected, new, blocks, offsets)
    assert torch.equal(kv.nan_to_num(nan=-77.0), expected.nan_to_num(nan=-77.0))
