"""GGUF files: small ones written here against transformers, damaged ones refused by name."""

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from engine.errors import ModelError
from engine.gguf import GgufSource
from tests.engine import models
from tests.engine.checkpoint_files import assert_equals
from tests.engine.gguf_files import settings_of, tensors_of, write_gguf

SHAPES = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "nine-heads": ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rms_norm_eps": 1e-5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
LEGACY = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.fixture(scope="module")
def llama_model():
    return models.build("llama")


@pytest.fixture
def write(tmp_path, llama_model):
    """write(settings, tensors, ...) -> path of a GGUF of the tiny Llama with these changes; None leaves one out."""

    def make(settings=None, tensors=None, **more):
        all_settings = settings_of(llama_model) | (settings or {})
        all_tensors = tensors_of(llama_model) | (tensors or {})
        kept = {key: value for key, value in all_tensors.items() if value is not None}
        return write_gguf(tmp_path / "tiny.gguf", all_settings, kept, **more)

    return make


@pytest.fixture
def refuse(make_engine):
    """refuse(path, *parts): loading is refused with a message that names the file and has all the parts."""

    def check(path, *parts: str) -> None:
        with pytest.raises(ModelError) as error:
            make_engine(model=str(path))
        for part in (str(path), *parts):
            assert part in str(error.value)

    return check


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gguf_equals_the_model_it_was_made_from(shape, tmp_path, make_engine):
    kind, changes = SHAPES[shape]
    model = models.build(kind, **changes)
    path = write_gguf(tmp_path / "tiny.gguf", settings_of(model), tensors_of(model), architecture=kind)
    assert_equals(make_engine(model=str(path)), model)


def test_linear_rope_scaling_is_read(write, make_engine):
    model = models.build("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    path = write({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert_equals(make_engine(model=str(path)), model, length=100)


def llama3_factors(theta: float, width: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What converters put into rope_freqs.weight for Llama 3.1 and later: a divisor for each plane."""
    found = []
    for plane in range(width // 2):
        turns = original * theta ** (-2 * plane / width) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_the_rope_factors_of_llama_3_are_read(tmp_path, make_engine):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    model = models.build("llama", rope_parameters=rope)
    factors = llama3_factors(1e4, 8, 8.0, 1.0, 4.0, 32)
    assert factors.min() == 1
    assert factors.max() == 8
    tensors = tensors_of(model) | {"rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "tiny.gguf", settings_of(model), tensors)
    assert_equals(make_engine(model=str(path)), model, length=100)


@pytest.mark.parametrize(
    "factors", [np.ones(3), np.ones((4, 1)), np.zeros(4), -np.ones(4), np.full(4, np.nan)], ids=str
)
def test_rope_factors_that_cannot_be_are_refused(write, refuse, factors):
    refuse(write(tensors={"rope_freqs.weight": factors.astype(np.float32)}), "rope_freqs.weight")


@pytest.mark.parametrize("kind", LEGACY)
def test_quantised_tensors_are_read_as_the_gguf_package_reads_them(tmp_path, make_engine, kind):
    """The oracle has the dequantised weights, so what is compared is all but the quantisation's own error."""
    model = models.build("llama", hidden_size=64, intermediate_size=128)
    quantised = GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "tiny.gguf", settings_of(model), tensors_of(model), kind=quantised)
    source = GgufSource(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = source.read(name)
            assert torch.allclose(found, parameter, atol=0.1 if kind.startswith("Q4") else 0.06)
            parameter.copy_(found)
    assert_equals(make_engine(model=str(path)), model)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["mamba", "gemma", "llama4"])
def test_an_unknown_architecture_is_refused_by_name(write, refuse, architecture):
    refuse(write(architecture=architecture), f"architecture {architecture!r} is not supported")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"llama.rope.scaling.type": "dynamic"}, "rope scaling 'dynamic'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor: a positive number"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor: a positive number"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "got 0.0"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"llama.attention.key_length": 16, "llama.attention.value_length": 8}, "llama.attention.value_length"),
        ({"llama.attention.sliding_window": 128}, "llama.attention.sliding_window = 128"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale = 0.5"),
        ({"llama.attention.causal": False}, "llama.attention.causal = False"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale = 2.0"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor = 1.5"),
        ({"llama.block_count": None}, "llama.block_count: a positive integer expected, got None"),
        ({"llama.embedding_length": 0}, "llama.embedding_length"),
        ({"llama.attention.head_count": "4"}, "llama.attention.head_count"),
        ({"llama.attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv"),
        ({"llama.attention.head_count_kv": 3}, "4 heads, 3 key/value heads"),
        (
            {"llama.embedding_length": 30, "llama.attention.key_length": None, "llama.attention.value_length": None},
            "hidden_size 30 is no multiple",
        ),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "tokenizer.ggml.eos_token_id"),
    ],
    ids=str,
)
def test_metadata_that_is_wrong_or_would_change_the_maths_is_refused(write, refuse, settings, message):
    refuse(write(settings), message)


def test_settings_that_are_off_or_say_nothing_about_the_maths_are_accepted(write):
    settings = {"llama.expert_count": 0, "llama.vocab_size": 160, "general.name": "x", "llama.rope.dimension_count": 8}
    settings |= {"llama.attention.causal": True}
    assert GgufSource(write(settings)).config.layers == 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.attn_q.weight": None}, "tensor model.layers.1.self_attn.q_proj.weight is missing"),
        ({"token_embd.weight": None}, "tensor token_embd.weight is missing"),
        ({"blk.2.attn_q.weight": np.zeros((32, 32), np.float32)}, "has no place"),
        ({"blk.0.ffn_gate_exps.weight": np.zeros((32, 32), np.float32)}, "blk.0.ffn_gate_exps.weight has no place"),
        ({"blk.0.attn_q.weight": np.zeros((28, 32), np.float32)}, "shape [28, 32], not [32, 32]"),
        ({"blk.0.attn_q.weight": np.zeros((30, 32), np.float32)}, "shape [30, 32], not [32, 32]"),
        ({"blk.0.attn_k.weight": np.zeros((16, 31), np.float32)}, "shape [16, 31], not [16, 32]"),
        ({"output_norm.weight": np.zeros(33, np.float32)}, "shape [33], not [32]"),
        ({"token_embd.weight": np.zeros(160, np.float32)}, "shape [160]"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_tensors_missing_unknown_or_mis_shaped_are_refused(write, refuse, tensors, message):
    refuse(write(tensors=tensors), message)


def test_a_gguf_cut_anywhere_is_refused_by_name(write, tmp_path, refuse):
    whole = write().read_bytes()
    path = tmp_path / "cut.gguf"
    lengths = [*range(0, 1200, 13), *range(1200, len(whole), len(whole) // 20), len(whole) - 100, len(whole) - 1]
    for length in lengths:
        path.write_bytes(whole[:length])
        refuse(path)


@pytest.mark.parametrize("offset", [8, 16])
def test_counts_beyond_the_file_are_refused_at_once(write, refuse, offset):
    path = write()
    content = bytearray(path.read_bytes())
    content[offset : offset + 8] = (2**60).to_bytes(8, "little")
    path.write_bytes(content)
    refuse(path)


def test_what_is_no_gguf_is_refused_by_name(tmp_path, refuse):
    path = tmp_path / "model.gguf"
    for content in (b"", b"GGUF", b"GGML" + b"\0" * 100, b"PK\x03\x04" + b"\0" * 100, b"GGUF\x63\0\0\0" + b"\0" * 100):
        path.write_bytes(content)
        refuse(path)


def test_random_damage_never_ends_in_anything_but_a_clear_refusal_or_a_model(write, tmp_path):
    """Flipped bytes may change a number that still makes sense; what must not come is another kind of error."""
    whole = write({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.5, 1.5]}).read_bytes()
    generator = np.random.default_rng(1)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[int(generator.integers(0, 3000))] = int(generator.integers(0, 256))
        path.write_bytes(damaged)
        try:
            source = GgufSource(path)
            for name in source.names():
                source.read(name)
        except ModelError:
            refused += 1
    assert refused > 100
