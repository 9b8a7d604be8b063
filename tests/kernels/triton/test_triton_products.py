"""Products of few rows, with what stands before and after them, against the references."""

import pytest
import torch

from kernels import reference
from kernels.triton.products import multiply_few
from tests.kernels.triton.test_triton_rows import NAN, TOLERANCES, dtypes, normal


@dtypes
@pytest.mark.parametrize(("rows", "inner", "outputs"), [(1, 256, 32), (5, 300, 40), (16, 100, 17)])
@pytest.mark.parametrize(("normed", "gated", "added"), [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_triton_products_of_few_rows_equal_their_reference(rows, inner, outputs, normed, gated, added, dtype):
    x, weight = normal(rows, inner, dtype=dtype), normal(outputs * (2 if gated else 1), inner, dtype=dtype, seed=1) / 16
    norm, residual = normal(inner, dtype=dtype, seed=2), normal(rows, outputs, dtype=dtype, seed=3)
    wide = x.float()
    if normed:
        wide = reference.rms_norm(wide, norm, 1e-5)
    expected = wide @ weight.float().T
    expected = reference.silu_mul(expected) if gated else expected
    expected = (expected + residual.float() if added else expected).to(dtype)
    options = {"norm": (norm, 1e-5) if normed else None, "gated": bool(gated), "residual": residual if added else None}
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(multiply_few(x, weight, **options), expected, **tolerance)


def test_triton_products_keep_a_rows_bits_for_any_number_of_rows():
    x, weight, norm = normal(16, 300), normal(32, 300, seed=1), normal(300, seed=2)
    whole = multiply_few(x, weight, norm=(norm, 1e-5))
    for count in (1, 2, 7):
        assert torch.equal(multiply_few(x[:count], weight, norm=(norm, 1e-5)), whole[:count])


def test_triton_products_read_nothing_beyond_their_rows():
    x, weight = normal(6, 64), normal(40, 64, seed=1)
    x[4:], weight[32:] = NAN, NAN
    torch.testing.assert_close(multiply_few(x[:4], weight[:32]), x[:4] @ weight[:32].T, **TOLERANCES[torch.float32])
