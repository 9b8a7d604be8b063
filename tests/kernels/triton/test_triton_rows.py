"""Norms, gates, and the launch between a layer's product and its attention, against the references."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.triton.backend import TritonBackend

BACKEND = TritonBackend(deterministic=False)
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float16: {"rtol": 2e-3, "atol": 1e-3}}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
NAN = float("nan")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
@pytest.mark.parametrize("width", [1, 48, 512, 1000])
def test_triton_norms_equal_their_reference(width, dtype):
    x, weight = normal(4, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    expected = reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(BACKEND.rms_norm(x, weight, 1e-6), expected, **TOLERANCES[dtype])
    heads = normal(3, 5, width, dtype=dtype)[:, 1:4]
    expected = reference.rms_norm(heads, weight.float(), 1e-6)
    torch.testing.assert_close(BACKEND.rms_norm(heads, weight.float(), 1e-6), expected, **TOLERANCES[dtype])


@dtypes
def test_triton_add_and_norm_is_an_addition_and_a_norm(dtype):
    hidden, more = normal(4, 1000, dtype=dtype) * 30, normal(4, 1000, dtype=dtype, seed=2)
    weight = normal(1000, dtype=dtype, seed=1)
    expected = hidden + more
    normed = BACKEND.add_rms_norm(hidden, more, weight, 1e-5)
    assert torch.equal(hidden, expected)
    assert torch.equal(normed, BACKEND.rms_norm(expected, weight, 1e-5))  # of the sum as it is kept, rounded
    torch.testing.assert_close(normed, reference.rms_norm(expected, weight, 1e-5), **TOLERANCES[dtype])


@dtypes
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
def test_triton_gates_equal_their_reference(gate, dtype):
    gate_up = normal(3, 2 * 1500, dtype=dtype) * 8
    gate_up[0, :4] = torch.tensor([0.0, -60.0, 60.0, -1e4])
    expected = getattr(reference, gate)(gate_up)
    tolerance = TOLERANCES[dtype] | {"atol": 1e-5 if dtype == torch.float32 else 1e-3}  # 1 + tanh cancels there
    torch.testing.assert_close(getattr(BACKEND, gate)(gate_up), expected, **tolerance)


def test_triton_says_once_that_a_variant_is_compiled():
    heard: list[str] = []
    backend = TritonBackend(deterministic=False, on_compile=heard.append)
    for width in (8, 8, 16):
        backend.rms_norm(normal(2, width), normal(width), 1e-6)
    assert heard == ["Triton kernel rms_norm"] * 2


def test_triton_rows_keep_their_bits_in_any_batch():
    x, weight, more = normal(5, 700), normal(700, seed=1), normal(5, 700, seed=3)
    whole, gated = BACKEND.rms_norm(x, weight, 1e-6), BACKEND.silu_mul(x)
    added = BACKEND.add_rms_norm(x.clone(), more, weight, 1e-6)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(BACKEND.rms_norm(x[one], weight, 1e-6), whole[one])
        assert torch.equal(BACKEND.silu_mul(x[one]), gated[one])
        assert torch.equal(BACKEND.add_rms_norm(x[one].clone(), more[one], weight, 1e-6), added[one])


@dtypes
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (7, 1, 80), (9, 3, 16)])
def test_triton_heads_are_normalised_turned_and_stored(heads, kv_heads, width, turned, normed, dtype):
    tokens, positions = 5, torch.tensor([0, 3, 17, 3, 9], dtype=torch.int32)
    blocks, offsets = torch.tensor([2, 0, -1, 4, 2], dtype=torch.int32), torch.tensor([1, 3, 0, 2, 0])
    qkv = normal(tokens, heads + 2 * kv_heads, width, dtype=dtype)
    kv, expected_kv = torch.full((2, 2, 6, kv_heads, 4, width), NAN, dtype=dtype)
    norms = (normal(width, dtype=dtype, seed=1), normal(width, dtype=dtype, seed=2)) if normed else None
    angles = torch.outer(torch.arange(20.0), 1e4 ** (-torch.arange(width // 2) / (width // 2)))
    cos, sin = torch.cat((angles.cos(),) * 2, 1)[:, None], torch.cat((-angles.sin(), angles.sin()), 1)[:, None]
    turn = (cos, sin, positions) if turned else None
    queries = BACKEND.norm_rope_store(qkv, kv, norms, turn, (blocks, offsets), 1e-6)

    rotated = qkv[:, : heads + kv_heads].float()
    if norms is not None:
        parts = rotated[:, :heads], rotated[:, heads:]
        pairs = zip(parts, norms, strict=True)
        rotated = torch.cat([reference.rms_norm(part, weight, 1e-6) for part, weight in pairs], 1)
    if turned:
        rotated = reference.rope(rotated, angles[positions].cos(), angles[positions].sin())
    stored = torch.stack((rotated[:, heads:], qkv[:, heads + kv_heads :].float()), 1).to(dtype)
    there = blocks >= 0
    reference.store_kv(expected_kv, stored[there], blocks[there], offsets[there])
    torch.testing.assert_close(queries, rotated[:, :heads].to(dtype), **TOLERANCES[dtype])
    torch.testing.assert_close(kv, expected_kv, equal_nan=True, **TOLERANCES[dtype])
