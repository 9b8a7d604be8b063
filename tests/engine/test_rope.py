"""Rotary embedding in all the spellings of config.json, and what is refused, by key and value."""

import pytest

from engine.errors import ModelError
from engine.modelconfig import load_config
from tests.engine.checkpoint_files import assert_config_refused, assert_equals, change_config, oracle_of
from tests.engine.driving import request

LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    "rope",
    [("default", {}), ("linear", {"factor": 4.0}), ("llama3", LLAMA3), ("dynamic", {"factor": 2.0}), ("yarn", YARN)],
    ids=lambda rope: rope[0],
)
def test_rope_is_read_from_both_places_and_both_key_names(llama, make_engine, place, key, rope):
    kind, parameters = rope
    change_config(llama, rope_parameters=..., rope_scaling=..., rope_theta=5000.0)
    scaling = {key: kind, **parameters}
    change_config(llama, **{place: scaling | ({"rope_theta": 5000.0} if place == "rope_parameters" else {})})
    oracle = oracle_of(llama)
    assert oracle.config.rope_parameters["rope_type"] == kind
    assert_equals(make_engine(model=str(llama)), oracle, length=100)


@pytest.mark.parametrize("scaling", [..., None, {}])
def test_no_scaling_is_the_default_rope(llama, scaling):
    change_config(llama, rope_parameters=..., rope_scaling=scaling, rope_theta=5000.0)
    rope = load_config(llama).rope
    assert (rope.kind, rope.theta) == ("default", 5000.0)


def test_without_a_theta_it_is_ten_thousand(llama):
    for theta in (..., None):
        change_config(llama, rope_parameters=..., rope_theta=theta)
        assert load_config(llama).rope.theta == 10000.0


@pytest.mark.parametrize("kind", ["su", "mrope", "proportional", "invented", "", 3, ["linear"]])
def test_an_unknown_rope_type_is_refused_by_name(llama, kind):
    change_config(llama, rope_parameters=..., rope_scaling={"rope_type": kind, "factor": 2.0})
    with pytest.raises(ModelError, match="rope type") as error:
        load_config(llama)
    assert repr(kind) in str(error.value)
    assert "linear" in str(error.value)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.3}, "attention_factor = 1.3"),
        ({"rope_type": "default", "factor": 2.0}, "factor = 2.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_type": "llama3", **LLAMA3, "beta_fast": 32}, "beta_fast = 32"),
        ({"rope_type": "linear"}, "factor: .*got None"),
        ({"rope_type": "linear", "factor": "4"}, "factor: .*got '4'"),
        ({"rope_type": "linear", "factor": True}, "factor: .*got True"),
        ({"rope_type": "linear", "factor": 0}, "factor: .*got 0"),
        ({"rope_type": "linear", "factor": -2.0}, "factor: .*got -2.0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor: .*got nan"),
        ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None}, "original_max_position"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "dynamic"}, "factor: .*got None"),
        ({"rope_type": "dynamic", "factor": 2.0, "beta_slow": 1}, "beta_slow = 1"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}, "attention_factor: .*got -1.0"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate: .*got 'no'"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1}, "original_max_position.*got 1"),
        ({"rope_type": "yarn", "factor": 2.0, "finetuned": True}, "finetuned = True"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "long_factor: .*got None"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 4}, "short_factor: a list of 4"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [0] * 4}, "long_factor: a list of 4"),
        (["linear", 2.0], r"rope_scaling.*\['linear', 2.0\]"),
        ("linear", "rope_scaling.*'linear'"),
    ],
    ids=str,
)
def test_wrong_rope_parameters_are_refused_by_name_and_value(llama, scaling, message):
    change_config(llama, rope_parameters=..., rope_scaling=scaling)
    assert_config_refused(llama, message)


def test_two_descriptions_of_rope_that_differ_are_refused(llama):
    linear = {"rope_type": "linear", "factor": 4.0}
    change_config(llama, rope_parameters={"rope_theta": 1e4, **linear}, rope_scaling=linear)
    assert load_config(llama).rope.kind == "linear"
    change_config(llama, rope_parameters={"rope_theta": 1e4, "rope_type": "default"}, rope_scaling=linear)
    assert_config_refused(llama, "rope_scaling.*rope_parameters")


@pytest.mark.parametrize("theta", ["1e4", True, 0, 1.0, -1.0, float("inf")])
def test_a_wrong_theta_is_refused(llama, theta):
    change_config(llama, rope_parameters=..., rope_theta=theta)
    assert_config_refused(llama, "rope_theta")


def test_positions_already_scaled_are_not_multiplied_again(llama, make_engine):
    """Position 63 works and 64 does not: 64 is the limit, factor 4 over an original 16 notwithstanding."""
    scaled = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 16}
    change_config(llama, max_position_embeddings=64, rope_parameters=..., rope_scaling=scaled)
    engine = make_engine(model=str(llama))
    assert engine.info.max_model_len == 64
    assert_equals(engine, oracle_of(llama), length=59)
    with pytest.raises(ValueError, match=r"tokens: 64 prompt tokens.*64"):
        engine.add(request("long", range(64)))


def test_linear_scaling_multiplies_the_position_limit_once(llama, make_engine):
    change_config(
        llama, max_position_embeddings=64, rope_parameters=..., rope_scaling={"type": "linear", "factor": 2.0}
    )
    engine = make_engine(model=str(llama))
    assert engine.info.max_model_len == 128
    assert_equals(engine, oracle_of(llama), length=123)
    with pytest.raises(ValueError, match="128"):
        engine.add(request("long", range(128)))
