"""Weights in 8 and 4 bits: against the same rounding in plain torch and GGML's own; bits in batches of any size."""

import gguf
import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuBackend
from tests.kernels.cpu.conftest import EXTRA, LEVELS, every_level, make_backend
from tests.kernels.cpu.test_cpu_linear import compute, random_tensor

GROUP = 32
KINDS = {8: gguf.GGMLQuantizationType.Q8_0, 4: gguf.GGMLQuantizationType.Q4_0}
SHAPES = [(32, 1), (64, 33), (1, 5), (95, 70), (576, 96), (1536, 64)]
kinds = pytest.mark.parametrize("bits", [8, 4])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def quantizing(level: str, bits: int, dtype: torch.dtype) -> CpuBackend:
    return CpuBackend(make_backend(level).library, deterministic=True, threads=2, dtype=dtype, bits=bits)


def groups_of(x: Tensor) -> Tensor:
    """x [rows, inner] filled up with zeros to [rows, groups, GROUP]."""
    missing = -x.shape[1] % GROUP
    return torch.nn.functional.pad(x.float(), (0, missing)).view(len(x), -1, GROUP)


def round_weight(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers [outputs, groups, GROUP] and scales [outputs, groups, 1], as float32."""
    groups = groups_of(weight)
    most = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    step = most.abs() / 127 if bits == 8 else most / -8
    inverse = torch.where(step == 0, 0, 1 / step)
    whole = (groups * inverse + (128.5 if bits == 8 else 8.5)).floor().clamp(0, 255 if bits == 8 else 15)
    return whole - (128 if bits == 8 else 8), step.half().float()


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = groups_of(x)
    most = groups.abs().amax(2, keepdim=True)
    return (groups * torch.where(most == 0, 0, torch.full_like(most, 127) / most)).round().clamp(-127, 127), most / 127


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    whole, scale = round_weight(weight, bits)
    rows, row_scale = round_rows(x)
    dots = torch.einsum("tgi,ogi->tog", rows, whole)
    y = (dots * row_scale.transpose(1, 2) * scale.squeeze(2)).double().sum(2)
    return (y if bias is None else y + bias.double()).to(x.dtype)


@every_level
@kinds
@dtypes
@shapes
def test_quantized_linear_equals_the_same_rounding_in_torch(cpu, bits, dtype, shape):
    inner, outputs = shape
    weight, bias = random_tensor(outputs, inner, seed=1) / inner**0.5, random_tensor(outputs, dtype=dtype, seed=2)
    linear = quantizing(cpu.library.level.name, bits, dtype).prepare_linear(weight.clone(), bias)
    for rows in (1, 2, 7, 13, 130):
        x = random_tensor(rows, inner, dtype=dtype, seed=rows)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-3}
        torch.testing.assert_close(compute(linear, x), reference(x, weight, bias, bits), **tolerance)


@every_level
@kinds
@dtypes
@shapes
def test_a_row_of_a_quantized_linear_has_the_same_bits_in_any_batch(cpu, bits, dtype, shape):
    inner, outputs = shape
    linear = quantizing(cpu.library.level.name, bits, dtype).prepare_linear(random_tensor(outputs, inner), None)
    x = random_tensor(200, inner, dtype=dtype)
    whole = linear(x)
    for rows in (*range(1, 20), 31, 32, 33, 64, 126, 127, 199):
        first = (rows * 7) % (201 - rows)
        assert torch.equal(linear(x[first : first + rows]), whole[first : first + rows]), f"in a batch of {rows}"


@kinds
def test_levels_that_round_fused_products_once_agree_on_quantized_weights(bits):
    """Products within a group are whole numbers, and sums over groups are made in one order on every level."""
    fused = [level for level in LEVELS if level != "generic" and level not in EXTRA]
    weight, x = random_tensor(70, 320, seed=1), random_tensor(9, 320)
    found = [quantizing(level, bits, torch.float32).prepare_linear(weight)(x) for level in fused]
    assert all(torch.equal(one, found[0]) for one in found)


@every_level
@kinds
def test_numbers_of_a_gguf_file_are_kept_exactly(cpu, bits):
    """Rounded again they are what they were, scales too: also subnormal scales and groups of zeros."""
    weight = random_tensor(66, 96, seed=3) * torch.logspace(-7, 3, 66)[:, None]
    weight[5], weight[7, 32:64] = 0, 0
    kept = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), KINDS[bits]), KINDS[bits]))
    backend = quantizing(cpu.library.level.name, bits, torch.float32)
    linear = backend.prepare_linear(kept.contiguous())
    assert torch.equal(linear.rows(torch.arange(66)), kept)


@every_level
@dtypes
def test_the_vocabulary_is_never_below_eight_bits(cpu, dtype):
    weight = random_tensor(50, 64)
    embed, head = quantizing(cpu.library.level.name, 4, dtype).prepare_vocabulary(weight)
    assert (embed(torch.arange(50)).float() - weight).abs().max() < weight.abs().max() / 127
    assert head(embed(torch.arange(50))).dtype == torch.float32


@kinds
def test_quantized_weights_take_the_memory_they_promise(cpu, bits):
    linear = quantizing(cpu.library.level.name, bits, torch.bfloat16).prepare_linear(random_tensor(64, 96))
    assert linear.packed.nbytes == 64 * 96 // GROUP * (GROUP * bits // 8 + 2)


@every_level
@kinds
def test_a_row_that_is_not_finite_shows_in_a_quantized_product(cpu, bits):
    linear = quantizing(cpu.library.level.name, bits, torch.float32).prepare_linear(random_tensor(40, 64))
    x = random_tensor(6, 64)
    clean = linear(x)
    x[1, 3], x[4, 60] = float("nan"), float("inf")
    out = linear(x)
    assert out[[1, 4]].isnan().all()
    assert torch.equal(out[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
