"""The C++ kernels of single rows against their references, and a row's bits in any batch."""

import pytest
import torch

from kernels import reference
from tests.kernels.cpu.conftest import every_level
from tests.kernels.cpu.test_cpu_linear import random_tensor

TOLERANCES = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}
ROWS = (1, 2, 3, 8, 13, 17, 64, 129, 300)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def doubled(angles):
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


@every_level
@dtypes
@pytest.mark.parametrize("shape", [(5, 1), (5, 8), (3, 33), (16, 576), (4, 9, 64), (6, 3, 80), (2, 1, 128)], ids=str)
def test_cpu_rms_norm_equals_its_reference(cpu, dtype, shape):
    weight = random_tensor(shape[-1], dtype=dtype, seed=1)
    for scale, eps in ((1e-3, 1e-6), (1.0, 1e-5), (100.0, 0.1)):
        x = random_tensor(*shape, dtype=dtype) * scale
        out = cpu.rms_norm(x, weight, eps)
        assert out.dtype == dtype
        torch.testing.assert_close(out, reference.rms_norm(x, weight, eps), **TOLERANCES[dtype])


@dtypes
def test_cpu_rms_norm_takes_slices_of_heads_and_zeros(cpu, dtype):
    x, weight = random_tensor(7, 6, 40, dtype=dtype), random_tensor(40, dtype=dtype, seed=1)
    for part in (x[:, :4], x[:, 4:5], x[:, 5], x[1:, ::2]):
        assert torch.equal(cpu.rms_norm(part, weight, 1e-5), cpu.rms_norm(part.contiguous(), weight, 1e-5))
    assert torch.equal(cpu.rms_norm(torch.zeros(3, 40, dtype=dtype), weight, 1e-6), torch.zeros(3, 40, dtype=dtype))


@every_level
@dtypes
@pytest.mark.parametrize("width", [1, 15, 40, 129])
def test_cpu_rms_norm_multiplies_by_float32_and_rounds_once_between_nans(cpu, dtype, width):
    """The weights are of a kind that is lost when they are rounded to bfloat16."""
    weight, field = 1 + random_tensor(width, seed=1) / 300, torch.full((9, width + 5), float("nan"), dtype=dtype)
    x = field[2:7, 3 : width + 3]
    x[:], y = random_tensor(5, width, dtype=dtype), torch.full((7, width), float("nan"), dtype=dtype)
    cpu.library.rms_norm(
        int(dtype == torch.bfloat16), x.data_ptr(), 5, width + 5, 1, width, weight.data_ptr(), 1e-6, y[1].data_ptr()
    )
    assert torch.equal(y[1:6], cpu.rms_norm(x.float(), weight, 1e-6).to(dtype))
    assert torch.equal(y[1:6], cpu.rms_norm(x, weight, 1e-6))
    assert y[[0, 6]].isnan().all()


@every_level
@dtypes
@pytest.mark.parametrize("heads", [1, 3, 9])
@pytest.mark.parametrize("width", [2, 8, 64, 80, 96, 128, 256])
def test_cpu_rope_equals_its_reference_on_slices_too(cpu, dtype, heads, width):
    angles = random_tensor(13, width // 2, seed=3) * 50
    x = random_tensor(13, heads + 2, width, dtype=dtype)[:, 1 : heads + 1]
    out = cpu.rope(x, *doubled(angles))
    assert out.dtype == dtype
    torch.testing.assert_close(out, reference.rope(x, angles.cos(), angles.sin()), rtol=8e-3, atol=4e-6)


@every_level
@dtypes
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("width", [1, 7, 56, 1536])
def test_cpu_gates_equal_their_references(cpu, dtype, gate, width):
    x = random_tensor(9, 2 * width, dtype=dtype) * 4
    out = getattr(cpu, gate)(x.clone())
    assert out.dtype == dtype
    torch.testing.assert_close(out, getattr(reference, gate)(x), rtol=8e-3, atol=4e-6)


@every_level
@dtypes
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
def test_cpu_gates_bear_huge_values_and_hand_on_nan(cpu, dtype, gate):
    gates = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4, float("nan")]], dtype=dtype)
    out = getattr(cpu, gate)(torch.cat((gates, torch.ones_like(gates)), 1))
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 1e4, float("nan")]], dtype=dtype)
    torch.testing.assert_close(out, expected, equal_nan=True)


@every_level
@dtypes
@pytest.mark.parametrize("width", [6, 14, 34, 66, 130])
def test_a_row_of_each_cpu_operation_has_the_same_bits_in_any_batch(cpu, dtype, width):
    x, weight = random_tensor(300, width, dtype=dtype, seed=2), random_tensor(width, dtype=dtype, seed=1)
    cos, sin = doubled(random_tensor(300, width // 2, seed=3) * 50)
    operations = {
        "rms_norm": lambda rows: cpu.rms_norm(x[rows], weight, 1e-5),
        "rope": lambda rows: cpu.rope(x[rows][:, None], cos[rows], sin[rows]),
        "silu": lambda rows: cpu.silu_mul(x[rows]),
        "gelu": lambda rows: cpu.gelu_mul(x[rows]),
    }
    for name, operation in operations.items():
        whole = operation(torch.arange(300))
        for size in ROWS:
            chosen = torch.randperm(300, generator=torch.Generator().manual_seed(size))[:size]
            assert torch.equal(operation(chosen), whole[chosen]), f"{name} in a batch of {size}"


@every_level
@dtypes
def test_an_elements_bits_do_not_depend_on_where_it_stands(cpu, dtype):
    """Vector bodies and tails compute alike: element j of a row of any width is what it is alone."""
    values = random_tensor(40, dtype=dtype) * 3
    for gate in (cpu.silu_mul, cpu.gelu_mul):
        alone = torch.cat([gate(values[[i, i]][None])[0] for i in range(40)])
        for width in range(1, 41):
            row = torch.cat((values[:width], values[:width]))[None]
            assert torch.equal(gate(row)[0], alone[:width]), width


@dtypes
@pytest.mark.parametrize("block_size", [1, 4, 24])
def test_cpu_store_kv_writes_these_places_and_no_others(cpu, dtype, block_size):
    kv = torch.full((2, 7, 3, block_size, 10), float("nan"), dtype=dtype)
    expected = kv.clone()
    places = torch.randperm(7 * block_size, generator=torch.Generator().manual_seed(0))[: min(7 * block_size, 11)]
    blocks, offsets = places // block_size, places % block_size
    new = random_tensor(len(places), 2, 3, 10, dtype=dtype)
    cpu.store_kv(kv, new, blocks, offsets)
    reference.store_kv(expected, new, blocks, offsets)
    assert torch.equal(kv.nan_to_num(nan=-77.0), expected.nan_to_num(nan=-77.0))


@every_level
def test_rounding_to_bfloat16_is_torchs(cpu):
    """Every kind of float32: ties, subnormals, infinities; through a norm of one element that leaves it as it is."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32)
    ties = (torch.arange(-512, 512, dtype=torch.int32) << 16) + 0x8000
    x = torch.cat((bits, ties)).view(torch.float32)
    x = x[x.isfinite()]
    halves = cpu.silu_mul(torch.cat((torch.full_like(x, 200.0), x / 256))[None].to(torch.bfloat16))
    expected = (x / 256).to(torch.bfloat16).float() * 200.0
    assert torch.equal(halves[0], expected.to(torch.bfloat16))
