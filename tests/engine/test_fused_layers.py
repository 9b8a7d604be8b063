"""All layers in one call give the bits of the separate operations, for every family."""

import pytest
import torch

from engine import SamplingParams
from engine.families import FAMILIES
from kernels import AttentionBatch
from tests.engine.driving import request, run
from tests.engine.families import random_tokens, record_positions
from tests.engine.test_families import SHAPES

SEPARATE: dict[str, str] = {}  # shapes that are not fused, and why
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nobody wrote to yet holds NaN."""
    empty = torch.empty

    def filled(*shape, **options):
        memory = empty(*shape, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture
def compiled(checkpoints, make_engine):
    """compiled(shape, **config): an engine with the C++ kernels."""

    def make(shape: str, **settings):
        kind, changes = SHAPES[shape]
        engine = make_engine(model=str(checkpoints(kind, **changes)[0]), max_step_tokens=23, **settings)
        if engine.runner.kernels.startswith("torch"):
            pytest.skip(engine.runner.kernels)
        return engine

    return make


def test_each_family_has_a_shape_that_is_fused():
    assert {kind for shape, (kind, _) in SHAPES.items() if shape not in SEPARATE} == set(FAMILIES)


def logits(engine, *, fused: bool) -> dict[int, torch.Tensor]:
    """Of all positions of a prompt that takes several chunks, and of a reply, by prefill and decode."""
    if not fused:
        engine.runner.model._fused = None
    recorded = record_positions(engine)
    run(engine, [request("x", random_tokens(50), SAMPLING)])
    return recorded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_layers_give_the_bits_of_separate_operations(compiled, shape, dtype):
    engine = compiled(shape, dtype=dtype)
    assert (engine.runner.model._fused is None) == (shape in SEPARATE), SEPARATE.get(shape)
    ours = logits(engine, fused=True)
    expected = logits(compiled(shape, dtype=dtype), fused=False)
    assert sorted(ours) == sorted(expected) == list(range(55))
    assert all(torch.equal(ours[position], expected[position]) for position in ours)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_fused_layers_of_few_bits_give_the_bits_of_separate_operations(compiled, bits):
    ours = logits(compiled("qwen3-window", dtype="bfloat16", quantize=bits), fused=True)
    expected = logits(compiled("qwen3-window", dtype="bfloat16", quantize=bits), fused=False)
    assert all(torch.equal(ours[position], expected[position]) for position in expected)


def test_fused_layers_refuse_what_would_write_elsewhere(compiled):
    engine = compiled("llama-biases")
    fused, cache = engine.runner.model._fused, engine.runner.cache
    batch = AttentionBatch([2], [2], torch.zeros(1, 1, dtype=torch.int64), 4, engine.runner._heads)
    hidden, places = torch.zeros(2, 72), torch.zeros(2, dtype=torch.int64)
    turns = [(torch.ones(2, 1, 8), torch.zeros(2, 1, 8))]
    good = {"hidden": hidden, "caches": cache, "turns": turns, "blocks": places, "offsets": places, "batch": batch}
    fused(**good)
    for wrong in (
        {"hidden": hidden[:, :71]},
        {"hidden": hidden.double()},
        {"caches": cache[:1]},
        {"turns": [(torch.ones(1, 1, 8), torch.zeros(1, 1, 8))]},
        {"blocks": places[:1]},
        {"offsets": places.int()},
    ):
        with pytest.raises((AssertionError, ValueError)):
            fused(**(good | wrong))


def test_blocks_of_one_token_serve_and_give_the_same_bits(compiled):
    ours = logits(compiled("qwen2-window", block_size=1), fused=True)
    expected = logits(compiled("qwen2-window"), fused=True)
    assert all(torch.equal(ours[position], expected[position]) for position in expected)
