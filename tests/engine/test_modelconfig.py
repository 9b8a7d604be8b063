"""config.json: head shapes, switches, dtypes, end ids; and what is refused, by file, key and value."""

import json
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.modelconfig import load_config
from tests.engine.checkpoint_files import (
    assert_config_refused,
    assert_equals,
    change_config,
    copy_checkpoint,
    oracle_of,
)
from tests.engine.driving import request, run

# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [None, ..., 8])
@pytest.mark.parametrize("kv_heads", [None, ..., 4])
def test_head_dim_and_kv_heads_may_be_null_or_absent(checkpoints, tmp_path, make_engine, head_dim, kv_heads):
    directory = copy_checkpoint(checkpoints, tmp_path / "llama", "llama", num_key_value_heads=4)
    change_config(directory, head_dim=head_dim, num_key_value_heads=kv_heads)
    assert_equals(make_engine(model=str(directory)), oracle_of(directory))


@pytest.mark.parametrize(
    ("family", "key", "default"),
    [("qwen3", "head_dim", 128), ("qwen2", "num_key_value_heads", 32), ("mistral", "num_key_value_heads", 8)],
)
def test_absent_keys_mean_what_their_family_means_by_them(llama, family, key, default):
    """transformers' own defaults: absent is not the same as null in every family."""
    shape = {"hidden_size": 64 * 32, "num_attention_heads": 32, "sliding_window": None}
    change_config(llama, model_type=family, **shape)
    change_config(llama, **{key: ...})
    config = load_config(llama)
    assert getattr(config, key.replace("num_key_value_heads", "kv_heads")) == default


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30, "head_dim": None}, "hidden_size 30 is no multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "4 heads, 3 key/value heads"),
        ({"num_key_value_heads": 8}, "4 heads, 8 key/value heads"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"head_dim": 0}, "head_dim.*got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers.*got 0"),
        ({"vocab_size": ...}, "vocab_size.*got None"),
        ({"vocab_size": "160"}, "vocab_size.*got '160'"),
        ({"intermediate_size": 56.0}, "intermediate_size.*got 56.0"),
        ({"num_attention_heads": True}, "num_attention_heads.*got True"),
        ({"max_position_embeddings": -1}, "max_position_embeddings.*got -1"),
        ({"rms_norm_eps": None}, "rms_norm_eps.*None"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps.*'1e-5'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps.*-1.0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings.*'false'"),
        ({"attention_bias": "no"}, "attention_bias.*'no'"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused_by_key_and_value(llama, changes, message):
    change_config(llama, **changes)
    assert_config_refused(llama, message)


# -- switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("invented_switch", True),
        ("invented_number", 0),
        ("quantization_config", {"quant_method": "gptq"}),
        ("num_experts", 8),
        ("residual_multiplier", 0.22),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("hidden_act", "gelu"),
        ("model_type", "mamba"),
        ("model_type", None),
        ("sliding_window", 128),
        ("layer_types", ["linear_attention", "full_attention"]),
        ("layer_types", ["full_attention"]),
        ("layer_types", "full_attention"),
        ("use_sliding_window", True),
        ("no_rope_layers", [1, 0]),
        ("final_logit_softcapping", 30.0),
        ("query_pre_attn_scalar", 8),
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 8.0),
        ("sliding_window_pattern", 6),
        ("use_bidirectional_attention", True),
        ("is_causal", False),
    ],
    ids=str,
)
def test_a_switch_that_would_change_the_maths_is_refused_by_name_and_value(llama, make_engine, key, value):
    change_config(llama, **{key: value})
    assert_config_refused(llama, key)
    with pytest.raises(ModelError, match=key):
        make_engine(model=str(llama))


@pytest.mark.parametrize("value", [None, False])
def test_an_unknown_switch_that_is_off_is_accepted(llama, value):
    change_config(llama, invented_switch=value)
    assert load_config(llama).layers == 2


def windows(directory: Path) -> list[int | None]:
    return [kind.window for kind in load_config(directory).layer_kinds]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_has_a_switch_and_a_first_layer_in_qwen(checkpoints, tmp_path, family):
    directory = copy_checkpoint(checkpoints, tmp_path / family, family)
    for switch in (False, ...):
        change_config(directory, sliding_window=64, use_sliding_window=switch, layer_types=...)
        assert windows(directory) == [None, None]
    change_config(directory, use_sliding_window=True)
    for first, expected in ((0, [64, 64]), (1, [None, 64]), (2, [None, None]), (..., [None, None])):
        change_config(directory, max_window_layers=first)
        assert windows(directory) == expected
    change_config(directory, sliding_window=None)
    assert windows(directory) == [None, None]
    change_config(directory, sliding_window=64, max_window_layers="1")
    assert_config_refused(directory, "max_window_layers.*'1'")


def test_absent_is_a_window_of_4096_in_mistral_and_null_is_none(llama):
    change_config(llama, model_type="mistral")
    for window, expected in ((64, 64), (..., 4096), (None, None)):
        change_config(llama, sliding_window=window)
        assert windows(llama) == [expected, expected]
    for window in (0, -1, 2.5, True, "64"):
        change_config(llama, sliding_window=window)
        assert_config_refused(llama, "sliding_window")


def test_layer_types_decide_and_need_a_window_that_is_on(checkpoints, tmp_path):
    directory = copy_checkpoint(checkpoints, tmp_path / "qwen3", "qwen3")
    types = ["sliding_attention", "full_attention"]
    change_config(directory, layer_types=types, sliding_window=8, use_sliding_window=True, max_window_layers=0)
    assert windows(directory) == [8, None]
    change_config(directory, use_sliding_window=False)
    assert_config_refused(directory, "use_sliding_window.*False")
    change_config(directory, use_sliding_window=True, sliding_window=None)
    assert_config_refused(directory, "sliding_window.*None")


def test_layers_without_rope_are_listed_or_counted(checkpoints, tmp_path):
    directory = copy_checkpoint(checkpoints, tmp_path / "smollm3", "smollm3", pad_token_id=0, num_hidden_layers=4)

    def rotated() -> list[bool]:
        return [kind.rope is not None for kind in load_config(directory).layer_kinds]

    change_config(directory, no_rope_layers=[1, 0, 0, 1, 0, 0])
    assert rotated() == [True, False, False, True]
    for interval, expected in ((2, [True, False] * 2), (..., [True] * 3 + [False])):
        change_config(directory, no_rope_layers=..., no_rope_layer_interval=interval)
        assert rotated() == expected
    for wrong in ([1, 0], [1, 0, 0, 2], "1001"):
        change_config(directory, no_rope_layers=wrong)
        assert_config_refused(directory, "no_rope_layers")


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("granite", "residual_multiplier", 0),
        ("granite", "logits_scaling", "8"),
        ("gemma2", "attn_logit_softcapping", -1.0),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "hidden_activation", None),
        ("gemma2", "sliding_window", None),
        ("gemma2", "sliding_window_size", 17),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("phi3", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.4}),
        ("phi3", "interpolate_factor", 2),
        ("phi3", "attention_bias", True),
        ("qwen2", "attention_bias", True),
        ("olmo2", "mlp_bias", True),
    ],
)
def test_what_a_family_does_not_know_is_refused_by_name(checkpoints, tmp_path, kind, key, value):
    directory = copy_checkpoint(checkpoints, tmp_path / kind, kind, pad_token_id=0)
    load_config(directory)
    change_config(directory, **{key: value})
    assert_config_refused(directory, key)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("phi3", {"interpolate_factor": 1, "full_attn_mod": 1}), ("gemma2", {"sliding_window_size": 4096})],
)
def test_what_a_family_ignores_may_be_there_with_the_value_that_changes_nothing(checkpoints, tmp_path, kind, changes):
    directory = copy_checkpoint(checkpoints, tmp_path / kind, kind, pad_token_id=0)
    before = load_config(directory)
    change_config(directory, **changes)
    assert load_config(directory) == before


# -- dtype and end ids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("torch.float16", "float16"),
        (None, "float32"),
        (..., "float32"),
        ("auto", "float32"),
    ],
    ids=str,
)
def test_the_dtype_is_read_by_a_fixed_table(llama, make_engine, key, value, chosen):
    change_config(llama, dtype=..., torch_dtype=...)
    change_config(llama, **{key: value})
    engine = make_engine(model=str(llama), dtype="auto")
    assert engine.info.dtype == chosen
    assert len(run(engine, [request("x", [3, 4])])["x"].tokens) == 8


def test_a_null_dtype_beside_a_torch_dtype_says_nothing(llama):
    change_config(llama, dtype=None, torch_dtype="bfloat16")
    assert load_config(llama).dtype == "bfloat16"


@pytest.mark.parametrize("value", ["float8", "float8_e4m3fn", "int8", "BFloat16", "", 16, ["float32"], True])
def test_an_unknown_dtype_is_refused(llama, value):
    change_config(llama, dtype=value)
    assert_config_refused(llama, "dtype")


@pytest.mark.parametrize(
    ("config", "generation", "union"),
    [
        (2, [2, 3], [2, 3]),
        ([2, 5], 7, [2, 5, 7]),
        (None, 3, [3]),
        (..., [], []),
        (2, None, [2]),
        (2, ..., [2]),
    ],
    ids=str,
)
def test_end_ids_are_the_union_of_config_and_generation_config(llama, make_engine, config, generation, union):
    change_config(llama, eos_token_id=config)
    path = llama / "generation_config.json"
    path.write_text(json.dumps({} if generation is ... else {"eos_token_id": generation}))
    assert load_config(llama).eos_token_ids == union
    path.unlink()
    assert load_config(llama).eos_token_ids == (config if isinstance(config, list) else [config] if config == 2 else [])


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, [2, None], {"id": 2}])
def test_wrong_end_ids_are_refused(llama, value):
    change_config(llama, eos_token_id=value)
    assert_config_refused(llama, "eos_token_id")
    change_config(llama, eos_token_id=2)
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        load_config(llama)


@pytest.mark.parametrize("content", ["", "{", "[]", '"llama"', "\x00", "[" * 100_000], ids=lambda text: text[:5])
def test_an_unreadable_config_is_refused_by_file(llama, content):
    for name in ("config.json", "generation_config.json"):
        path = llama / name
        before = path.read_text()
        path.write_text(content)
        with pytest.raises(ModelError, match=name):
            load_config(llama)
        path.write_text(before)


def test_a_missing_config_is_refused_by_file(llama, make_engine):
    (llama / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: no such file"):
        make_engine(model=str(llama))


def test_a_missing_model_directory_is_refused_by_name(make_engine, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        make_engine(model=str(tmp_path / "nowhere"))
