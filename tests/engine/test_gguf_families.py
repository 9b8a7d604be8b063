"""GGUF files of every architecture, written as converters write them, against transformers."""

import numpy as np
import pytest

from engine.errors import ModelError
from engine.gguf import GgufSource
from engine.modelconfig import load_config
from tests.engine import models
from tests.engine.families import assert_every_position_equals
from tests.engine.gguf_files import architecture_of, settings_of, tensors_of, write_gguf

NINE_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e4}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0], "attention_factor": 1.25}
PARTIAL = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONGROPE = {"pad_token_id": 0, "rope_parameters": PARTIAL | FACTORS}
GEMMA = {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
GEMMA2 = {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0} | GEMMA
SHAPES = {
    "mistral": ("mistral", {"sliding_window": None} | NINE_HEADS),
    "llama-yarn": ("llama", {"rope_parameters": YARN, "attention_bias": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN, "head_dim": 16}),
    "phi3": ("phi3", {"pad_token_id": 0} | NINE_HEADS),
    "phi3-window": ("phi3", {"pad_token_id": 0, "sliding_window": 7, "num_key_value_heads": 1}),
    "phi3-short": ("phi3", LONGROPE | {"original_max_position_embeddings": 64}),
    "phi3-long": ("phi3", LONGROPE | {"original_max_position_embeddings": 32}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "rope_parameters": {FULL: LINEAR, SLIDING: LOCAL}} | GEMMA),
    "granite": (
        "granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.17, "residual_multiplier": 0.22, "logits_scaling": 8.0}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "olmo2": ("olmo2", NINE_HEADS),
    "smollm3": ("smollm3", {"pad_token_id": 0, "num_hidden_layers": 5, "attention_bias": True}),
}


@pytest.fixture
def write_tiny(tmp_path):
    """write_tiny(shape, settings, tensors) -> path of its GGUF, and the model; what is None is left out."""

    def write(shape, settings=None, tensors=None):
        kind, changes = SHAPES[shape]
        model = models.build(kind, **changes)
        all_settings = settings_of(model) | (settings or {})
        kept = {key: value for key, value in (tensors_of(model) | (tensors or {})).items() if value is not None}
        return write_gguf(tmp_path / "tiny.gguf", all_settings, kept, architecture=architecture_of(model)), model

    return write


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gguf_family_equals_transformers_at_every_position(shape, write_tiny, make_engine):
    path, model = write_tiny(shape)
    assert_every_position_equals(make_engine(model=str(path)), model, prompt_length=36, output_length=5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gguf_says_the_same_as_config_json(shape, write_tiny, tmp_path):
    """Flags, windows, ropes and limits; numbers as exact as GGUF's float32."""
    path, model = write_tiny(shape)
    model.save_pretrained(tmp_path / "directory")
    ours, theirs = GgufSource(path).config, load_config(tmp_path / "directory")
    assert ours.position_limit == theirs.position_limit
    for name in (*ours.__struct_fields__, "scale"):
        if name not in ("family", "dtype", "eos_token_ids", "kinds", "rope", "attention_scale"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name
    for mine, other in zip(ours.layer_kinds, theirs.layer_kinds, strict=True):
        assert mine.window == other.window
        assert (mine.rope is None) == (other.rope is None)


def test_gemma_norms_keep_the_bits_that_they_had_before_conversion(write_tiny):
    """In bfloat16, 1 + weight would lose what was learnt: converters add the 1 in float32, and we take it off there."""
    learnt = np.array([0.0123, -0.0071, 0.5, 2.25], np.float32).repeat(8)
    path, _ = write_tiny("gemma2", tensors={"output_norm.weight": learnt + 1})
    assert GgufSource(path).read("model.norm.weight").numpy() == pytest.approx(learnt, abs=1e-7)


# -- what a file leaves out -------------------------------------------------------------------------------------------


def test_the_largest_gemma_scales_attention_by_hidden_size_over_heads(write_tiny):
    """The file says nothing of it; llama.cpp knows the 27B models by their number of layers."""
    for shape, layers in (("gemma2", 46), ("gemma3", 62)):
        path, _ = write_tiny(shape, {f"{shape}.block_count": layers})
        assert GgufSource(path).config.scale == pytest.approx((32 // 4) ** -0.5)
        path, _ = write_tiny(shape)
        assert GgufSource(path).config.scale == pytest.approx(16**-0.5)


def test_an_old_gemma_2_file_without_soft_caps_has_the_usual_ones(write_tiny):
    names = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")
    config = GgufSource(write_tiny("gemma2", {f"gemma2.{name}": None for name in names})[0]).config
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    assert [kind.window for kind in config.kinds] == [4096, None] * 3 + [4096]


def test_layers_without_rope_and_with_windows_follow_the_architecture(write_tiny):
    kinds = GgufSource(write_tiny("smollm3")[0]).config.kinds
    assert [kind.rope is None for kind in kinds] == [False, False, False, True, False]
    kinds = GgufSource(write_tiny("gemma3")[0]).config.kinds
    assert [kind.window for kind in kinds] == [5, 5, 5, 5, 5, None, 5]
    kinds = GgufSource(write_tiny("gemma3", {"gemma3.attention.sliding_window_pattern": 3})[0]).config.kinds
    assert [kind.window for kind in kinds] == [5, 5, None, 5, 5, None, 5]


def test_a_factor_without_a_type_is_linear_and_one_of_no_scaling_is_nothing(write_tiny):
    rope = {"llama.rope.scaling.type": None, "llama.rope.scaling.original_context_length": None}
    config = GgufSource(write_tiny("llama-yarn", rope)[0]).config
    assert (config.rope.kind, config.rope.factor) == ("linear", 4.0)
    config = GgufSource(write_tiny("llama-yarn", rope | {"llama.rope.scaling.type": "none"})[0]).config
    assert (config.rope.kind, config.rope.factor) == ("default", 1.0)


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        ("llama-yarn", {"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
        ("llama-yarn", {"llama.rope.scaling.yarn_attn_factor": 1.5}, "yarn_attn_factor = 1.5"),
        ("llama-yarn", {"llama.rope.scaling.yarn_log_multiplier": 1.0}, "yarn_log_multiplier = 1.0"),
        ("llama-yarn", {"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ("olmo2", {"olmo2.attention.sliding_window": 4096}, "olmo2.attention.sliding_window = 4096"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned = False"),
        ("granite", {"granite.logit_scale": None}, "granite.logit_scale: a positive number"),
        ("gemma3", {"gemma3.attention.sliding_window": None}, "gemma3.attention.sliding_window: a positive integer"),
        ("gemma2", {"gemma2.rope.scaling.type": "linear"}, "rope scaling 'linear' is not supported"),
        ("phi3-long", {"phi3.rope.scaling.attn_factor": None}, "phi3.rope.scaling.attn_factor: a positive number"),
        ("phi3-long", {"phi3.rope.dimension_count": 8}, "rope_factors_short.weight: 3 factors for heads of which 8"),
        ("phi3-long", {"phi3.rope.dimension_count": 10}, "phi3.rope.dimension_count"),
        ("mistral", {"llama.attention.temperature_scale": 0.1}, "llama.attention.temperature_scale"),
    ],
    ids=str,
)
def test_what_is_not_clear_from_the_file_is_refused_by_name(shape, settings, message, write_tiny):
    path, _ = write_tiny(shape, settings)
    with pytest.raises(ModelError) as error:
        _ = GgufSource(path).config
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_rope_factors_that_are_missing_or_of_another_architecture_are_refused(write_tiny):
    for shape, name, value in (
        ("phi3-long", "rope_factors_short.weight", None),
        ("smollm3", "rope_freqs.weight", np.ones(4, np.float32)),
        ("llama-yarn", "rope_freqs.weight", np.ones(4, np.float32)),
    ):
        path, _ = write_tiny(shape, tensors={name: value})
        with pytest.raises(ModelError, match=name.removesuffix(".weight")):
            GgufSource(path)
