"""The packed product against its reference, its bits in batches of any size, and that it writes what it owns."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.backend import CpuBackend
from kernels.cpu.linear import PackedLinear
from kernels.rows import cancelling
from tests.kernels.cpu.conftest import every_level

BFLOAT16 = {"rtol": 8e-3, "atol": 1e-3}
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: BFLOAT16}
SHAPES = [(1, 1), (7, 13), (2, 32), (33, 33), (32, 56), (129, 95), (576, 960), (1536, 64), (16, 4099)]
COUNTS = (*range(1, 65), 127, 128, 251, 252, 253, 300)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compute(linear: PackedLinear, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The product, in x's dtype or widened, into a field of NaN; asserts that the field around it is left alone."""
    margin, rows, outputs = 3, len(x), linear.outputs
    field = torch.full((rows + 2 * margin, outputs + margin), float("nan"), dtype=dtype or x.dtype)
    y = field[margin : margin + rows, :outputs]
    linear.library.linear(
        linear.format, x.data_ptr(), x.stride(0), rows, linear.packed.data_ptr(), linear.inner, outputs,
        linear.bias.data_ptr() if linear.bias is not None else None, y.data_ptr(), field.stride(0),
        int(field.dtype != x.dtype),
    )  # fmt: skip
    around = torch.ones_like(field, dtype=torch.bool)
    around[margin : margin + rows, :outputs] = False
    assert field[around].isnan().all(), "wrote beside its output"
    return y.clone()


@every_level
@dtypes
@shapes
@pytest.mark.parametrize("biased", [False, True])
def test_packed_linear_equals_its_reference_and_writes_nothing_else(cpu, dtype, shape, biased):
    inner, outputs = shape
    weight = random_tensor(outputs, inner, dtype=dtype, seed=1) / inner**0.5
    bias = random_tensor(outputs, dtype=dtype, seed=2) if biased else None
    linear = cpu.prepare_linear(weight.clone(), bias)
    for rows in (1, 2, 7, 15, 33, 130):
        x = random_tensor(rows, inner, dtype=dtype, seed=rows)
        expected = reference.linear(x, weight, bias)
        torch.testing.assert_close(compute(linear, x), expected, **TOLERANCES[dtype])
        torch.testing.assert_close(linear(x), expected, **TOLERANCES[dtype])


@every_level
@dtypes
@shapes
def test_a_row_of_the_packed_linear_has_the_same_bits_in_any_batch(cpu, dtype, shape):
    inner, outputs = shape
    x, weight = cancelling(300, outputs, inner, dtype, torch.device("cpu"))
    linear = cpu.prepare_linear(weight, random_tensor(outputs, dtype=dtype))
    whole = linear(x)
    for rows in COUNTS:
        first = (rows * 7) % (301 - rows)
        assert torch.equal(linear(x[first : first + rows]), whole[first : first + rows]), f"in a batch of {rows}"


@dtypes
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_threads_do_not_change_the_bits_of_the_packed_linear(cpu, pool_threads, dtype, count):
    x, weight = cancelling(70, 330, 96, dtype, torch.device("cpu"))
    linear = cpu.prepare_linear(weight)
    expected = linear(x)
    pool_threads(count)
    for _ in range(20):
        assert torch.equal(linear(x), expected)


@every_level
@pytest.mark.parametrize("shape", [(7, 13), (32, 64), (576, 959)], ids=str)
def test_widened_results_are_the_rounded_ones_in_float32(cpu, shape):
    inner, outputs = shape
    linear = cpu.prepare_linear(random_tensor(outputs, inner).bfloat16(), random_tensor(outputs).bfloat16())
    for rows in (1, 20, 70):
        x = random_tensor(rows, inner, seed=rows).bfloat16()
        assert torch.equal(compute(linear, x, torch.float32), linear(x).float())


@every_level
@dtypes
@shapes
def test_the_packed_weight_gives_its_rows_back_exactly(cpu, dtype, shape):
    weight = random_tensor(shape[1], shape[0], dtype=dtype)
    embed, head = cpu.prepare_vocabulary(weight)
    ids = torch.randint(0, shape[1], (50,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(embed(ids), weight[ids])
    assert torch.equal(head(embed(ids)), cpu.prepare_linear(weight)(weight[ids]).float())


def test_a_token_id_outside_the_vocabulary_is_refused(cpu):
    embed, _ = cpu.prepare_vocabulary(random_tensor(40, 8))
    for wrong in (-1, 40):
        with pytest.raises(AssertionError, match="token id out of range"):
            embed(torch.tensor([3, wrong]))


@dtypes
def test_strided_and_empty_inputs_are_taken(cpu, dtype):
    weight, x = random_tensor(40, 24, dtype=dtype), random_tensor(10, 3, 24, dtype=dtype)
    linear = cpu.prepare_linear(weight)
    assert torch.equal(linear(x[:, 1]), linear(x[:, 1].contiguous()))
    assert torch.equal(linear(x[:, 0].T.contiguous().T), linear(x[:, 0].contiguous()))
    assert linear(x[:0, 0]).shape == (0, 40)


@dtypes
def test_what_is_not_finite_stays_in_its_row_and_column(cpu, dtype):
    weight, x = random_tensor(70, 33, dtype=dtype), random_tensor(20, 33, dtype=dtype)
    clean = cpu.prepare_linear(weight)(x)
    x[3, 5] = float("inf")
    weight[69, 2] = float("nan")
    out = cpu.prepare_linear(weight)(x)
    assert not out[3].isfinite().any()
    assert out[:, 69].isnan().all()
    rest = torch.ones_like(out, dtype=torch.bool)
    rest[3], rest[:, 69] = False, False
    assert torch.equal(out[rest], clean[rest])


def test_packing_keeps_one_copy_and_aligns_it(cpu: CpuBackend):
    weight = random_tensor(64, 48, dtype=torch.bfloat16)
    linear = cpu.prepare_linear(weight)
    assert linear.packed.nbytes == weight.nbytes
    assert linear.packed.data_ptr() % 64 == 0
    expected = linear(weight)
    weight.fill_(float("nan"))
    assert torch.equal(linear(random_tensor(64, 48, dtype=torch.bfloat16)), expected), "it still reads the weight"
