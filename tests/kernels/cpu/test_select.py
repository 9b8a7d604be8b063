"""Who computes: by what was asked for, the device, the dtype and what can be had here."""

import re

import gguf
import pytest
import torch

from engine import SamplingParams
from kernels import KernelsMissingError, TorchBackend, select
from kernels.cpu import library
from kernels.cpu.backend import CpuBackend
from tests.engine import models
from tests.engine.driving import record_logits, request, run, same_bits
from tests.engine.gguf_files import settings_of, tensors_of, write_gguf
from tests.kernels.cpu.conftest import LEVELS

CPU = torch.device("cpu")
NONE = library.Missing("no C++ compiler: none is installed")


def test_torch_is_taken_when_asked_for():
    chosen = select(kernels="torch", deterministic=True, device=CPU)
    assert (type(chosen), chosen.name, chosen.numerics) == (TorchBackend, "torch", "torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernels", ["auto", "cpu"])
def test_the_kernels_are_taken_on_a_cpu(cpu, kernels, dtype):
    chosen = select(kernels=kernels, deterministic=True, device=CPU, dtype=dtype)
    assert isinstance(chosen, CpuBackend)
    assert chosen.name == f"cpu-{LEVELS[0]}"
    assert library.load().numerics in chosen.numerics


@pytest.mark.parametrize(
    ("dtype", "missing", "reason"),
    [(torch.float16, False, "there are none for float16"), (torch.bfloat16, True, NONE.reason)],
    ids=["dtype", "compiler"],
)
def test_without_kernels_torch_serves_and_says_why_unless_they_were_asked_for(monkeypatch, dtype, missing, reason):
    if missing:
        monkeypatch.setattr(library, "load", lambda on_compile, dtype: NONE)
    chosen = select(kernels="auto", deterministic=True, device=CPU, dtype=dtype)
    assert (type(chosen), chosen.name) == (TorchBackend, f"torch (no C++ kernels: {reason})")
    with pytest.raises(KernelsMissingError, match=re.escape(reason)):
        select(kernels="cpu", deterministic=True, device=CPU, dtype=dtype)


def test_weights_in_few_bits_need_the_kernels(cpu, monkeypatch):
    chosen = select(kernels="auto", quantize="int4", deterministic=True, device=CPU, dtype=torch.bfloat16)
    assert chosen.name == f"cpu-{LEVELS[0]}-int4"
    with pytest.raises(KernelsMissingError, match="quantize: 'int8' needs the C"):
        select(kernels="torch", quantize="int8", deterministic=True, device=CPU)
    monkeypatch.setattr(library, "load", lambda on_compile, dtype: NONE)
    with pytest.raises(KernelsMissingError, match=re.escape(NONE.reason)):
        select(kernels="auto", quantize="int8", deterministic=True, device=CPU)


def test_an_engine_tells_who_computes_and_numerics_follow(cpu, make_engine):
    infos = [make_engine(kernels=kernels, quantize=bits).info for kernels, bits in
             [("torch", "none"), ("cpu", "none"), ("cpu", "int8"), ("cpu", "int4")]]  # fmt: skip
    assert [info.kernels for info in infos] == [
        "torch", *(f"cpu-{LEVELS[0]}{bits}" for bits in ("", "-int8", "-int4"))]  # fmt: skip
    assert len({info.numerics for info in infos}) == 4
    assert infos[3].weight_bytes < infos[2].weight_bytes < infos[1].weight_bytes
    # Of each layer, 34 and 18 bytes for 32 numbers; rows are filled up to 32 numbers, panels to 32 outputs.
    products = 2 * (64 * 32 + 32 * 32 + 128 * 32 + 32 * 64)
    assert infos[2].weight_bytes - infos[3].weight_bytes == products // 32 * (34 - 18)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_quantized_chunks_batches_and_cache_are_the_same_bits(cpu, make_engine, quantize, dtype, kind):
    prompt, settings = list(range(3, 44)), {"kind": kind, "dtype": dtype, "quantize": quantize}
    sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
    alone = make_engine(**settings)
    truth = record_logits(alone)
    expected = run(alone, [request("x", prompt, sampling)])["x"].tokens
    other = make_engine(**settings, prefix_cache=True, max_step_tokens=7)
    run(other, [request("warm", prompt[:20], sampling)])
    logits = record_logits(other)
    strangers = [request(f"s{i}", prompt[i:], sampling) for i in range(1, 6)]
    assert run(other, [*strangers, request("x", prompt, sampling)])["x"].tokens == expected
    assert same_bits(truth, logits, "x") == 12


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantized_gguf_file_is_kept_as_it_is(cpu, make_engine, tmp_path, quantize):
    """Rounded to bfloat16 on the way, its numbers would come out as others."""
    kind = {"int8": gguf.GGMLQuantizationType.Q8_0, "int4": gguf.GGMLQuantizationType.Q4_0}[quantize]
    model = models.build("llama", intermediate_size=64)
    path = write_gguf(tmp_path / "model.gguf", settings_of(model), tensors_of(model), kind=kind)
    engine = make_engine(model=str(path), dtype="bfloat16", quantize=quantize)
    for layer, theirs in zip(engine.runner.model._layers, model.model.layers, strict=True):
        weight = theirs.mlp.down_proj.weight.detach().numpy()
        kept = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind))
        assert torch.equal(layer.down.rows(torch.arange(len(kept))), kept.bfloat16())
