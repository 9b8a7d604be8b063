"""Every family against transformers, in odd shapes: logits at every position, by prefill, chunk and decode."""

import pytest
import torch

from engine.modelconfig import load_config
from tests.engine.checkpoint_files import assert_config_refused, change_config, copy_checkpoint, oracle_of
from tests.engine.families import assert_every_position_equals

NINE_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
ONE_KV_HEAD = {"num_key_value_heads": 1}
WIDE_HEADS = {"hidden_size": 24, "head_dim": 8}  # head_dim is not hidden / heads
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA = {"num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 11, "tie_word_embeddings": True}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4}
SHAPES = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True} | NINE_HEADS),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"} | ONE_KV_HEAD),
    "mistral": ("mistral", {"sliding_window": None} | NINE_HEADS),
    "mistral-window": ("mistral", {"sliding_window": 7} | ONE_KV_HEAD),
    "mistral-window-below-a-block": ("mistral", {"sliding_window": 3, "tie_word_embeddings": True} | WIDE_HEADS),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1}),
    "mistral-window-beyond-all": ("mistral", {"sliding_window": 4096}),
    "ministral": ("ministral", {"sliding_window": 9, "head_dim": 8}),
    "ministral-mixed": ("ministral", {"sliding_window": 5, "layer_types": [FULL, SLIDING], "head_dim": 16}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-layer-types": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": [SLIDING, FULL]} | NINE_HEADS,
    ),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "head_dim": 16}
        | {"attention_bias": True, "num_key_value_heads": 1},
    ),
    "smollm3": ("smollm3", {"pad_token_id": 0, "no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3-all-switches": (
        "smollm3",
        {"pad_token_id": 0, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 6}
        | {"attention_bias": True, "mlp_bias": True}
        | NINE_HEADS,
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.17, "residual_multiplier": 0.22, "logits_scaling": 8.0}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "granite-defaults": ("granite", NINE_HEADS),
    "phi3": ("phi3", {"pad_token_id": 0} | NINE_HEADS),
    "phi3-window": ("phi3", {"pad_token_id": 0, "sliding_window": 7, "tie_word_embeddings": True} | ONE_KV_HEAD),
    "phi3-partial-rope": (
        "phi3",
        {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ),
    "olmo2": ("olmo2", NINE_HEADS),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True} | ONE_KV_HEAD),
    "gemma2": (
        "gemma2",
        {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0} | GEMMA,
    ),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
        | {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 13}
        | GEMMA
        | NINE_HEADS,
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]} | GEMMA),
    "gemma3-linear-rope": (
        "gemma3_text",
        {"sliding_window": 6, "layer_types": [SLIDING, SLIDING, FULL], "final_logit_softcapping": 4.0}
        | {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 500.0}}}
        | {"attention_bias": True, "num_key_value_heads": 1}
        | GEMMA,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_family_equals_transformers_at_every_position(shape, checkpoints, make_engine):
    kind, changes = SHAPES[shape]
    directory, oracle = checkpoints(kind, **changes)
    assert_every_position_equals(make_engine(model=str(directory), max_step_tokens=23), oracle, prompt_length=50)


def test_mistral_with_layer_types_is_read_as_ministral(checkpoints, tmp_path, make_engine):
    """As transformers' AutoModel does: the layers' types decide, not the window alone."""
    shape = {"sliding_window": 5, "layer_types": [FULL, SLIDING], "head_dim": 16}
    directory = copy_checkpoint(checkpoints, tmp_path / "mistral", "ministral", **shape)
    change_config(directory, model_type="mistral", architectures=["MistralForCausalLM"])
    assert_every_position_equals(make_engine(model=str(directory)), oracle_of(directory), prompt_length=30)


def test_phi3_has_its_window_in_all_layers_whatever_layer_types_say(checkpoints, tmp_path, make_engine):
    """transformers does not read them there, so they are refused unless they say just that."""
    shape = {"sliding_window": 7, "pad_token_id": 0, "tie_word_embeddings": True} | ONE_KV_HEAD
    directory = copy_checkpoint(checkpoints, tmp_path / "phi3", "phi3", **shape)
    change_config(directory, layer_types=[FULL, SLIDING])
    assert_config_refused(directory, f"layer_types.*{SLIDING}.*got.*{FULL}")
    change_config(directory, layer_types=[SLIDING, SLIDING])
    assert_every_position_equals(make_engine(model=str(directory)), oracle_of(directory), prompt_length=30)


def test_gemma3_as_it_was_written_before_transformers_5(checkpoints, tmp_path, make_engine):
    """A period instead of a list of layers, two thetas, and a rope_scaling for the layers that see everything."""
    directory = copy_checkpoint(checkpoints, tmp_path / "gemma3", "gemma3_text", sliding_window=5, **GEMMA)
    older = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 5e4, "rope_local_base_freq": 700.0}
    change_config(directory, layer_types=..., rope_parameters=..., _sliding_window_pattern=..., **older)
    change_config(directory, sliding_window_pattern=2, cache_implementation="hybrid", hidden_act="gelu_pytorch_tanh")
    kinds = load_config(directory).layer_kinds
    assert [kind.window for kind in kinds] == [5, None, 5]
    assert [(kind.rope.theta, kind.rope.kind) for kind in kinds] == [
        (700, "default"),
        (5e4, "linear"),
        (700, "default"),
    ]
    assert_every_position_equals(make_engine(model=str(directory)), oracle_of(directory), prompt_length=30)


def test_the_factor_of_gemma3_is_in_its_limit_already(checkpoints, tmp_path):
    directory = copy_checkpoint(checkpoints, tmp_path / "gemma3", "gemma3_text", sliding_window=5, **GEMMA)
    change_config(directory, rope_parameters=..., rope_scaling={"factor": 8.0, "rope_type": "linear"})
    assert load_config(directory).position_limit == 512


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_gemmas_embedding_scale_is_rounded_as_its_weights_are(checkpoints, make_engine, kind):
    directory, oracle = checkpoints(kind, hidden_size=56, num_attention_heads=4, **GEMMA)
    ids = torch.arange(160)
    for dtype in ("float32", "bfloat16"):
        model = make_engine(model=str(directory), dtype=dtype).runner.model
        oracle.to(getattr(torch, dtype))
        assert torch.equal(model._embed(ids) * model._multiplier, oracle.model.embed_tokens(ids).detach())
    oracle.float()


def test_gemmas_norms_keep_their_precision_in_bfloat16(checkpoints, make_engine):
    """Weights of a thousandth are lost when 1 is added to them in bfloat16."""
    directory, _ = checkpoints("gemma2", sliding_window=5, **GEMMA)
    layer = make_engine(model=str(directory), dtype="bfloat16").runner.model._layers[0]
    assert layer.input_norm.dtype == torch.float32
    fine = make_engine(model=str(directory)).runner.model._layers[0]
    torch.testing.assert_close(layer.input_norm, fine.input_norm, rtol=0, atol=0.5 / 256)


def test_bfloat16_models_of_all_styles_are_near_their_float32_selves(checkpoints, make_engine):
    for kind, changes in (SHAPES["gemma2"], SHAPES["olmo2"], SHAPES["granite"], SHAPES["phi3-window"]):
        directory, oracle = checkpoints(kind, **changes)
        engine = make_engine(model=str(directory), dtype="bfloat16")
        assert_every_position_equals(engine, oracle, prompt_length=20, tolerance=0.1, greedy=False)
