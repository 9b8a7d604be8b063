"""Ropes that stretch a model beyond its training: at every position, below and beyond the original limit.

Where the frequencies depend on a sequence's length (dynamic, longrope), transformers looks at the length so far, and
ours at the length that the request may grow to. Both mean the same for a whole sequence at once, which is compared.
"""

import pytest

from engine import SamplingParams
from engine.modelconfig import load_config
from tests.engine.checkpoint_files import assert_config_refused, change_config, copy_checkpoint, oracle_of
from tests.engine.driving import record_logits, request, run, same_bits
from tests.engine.families import assert_every_position_equals, random_tokens

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.2, 2.0, 4.0, 9.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "yarn": (YARN, 128),
    "yarn-without-an-original-limit": ({"rope_type": "yarn", "factor": 4.0}, 32),
    "yarn-attention-factor": (YARN | {"attention_factor": 1.3}, 128),
    "yarn-mscale": (YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}, 128),
    "yarn-betas": (YARN | {"beta_fast": 3.0, "beta_slow": 0.5}, 128),
    "yarn-not-truncated": (YARN | {"beta_fast": 3.0, "beta_slow": 0.5, "truncate": False}, 128),
    "llama3": (LLAMA3 | {"original_max_position_embeddings": 16}, 128),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 32),
    "longrope": (LONGROPE | {"original_max_position_embeddings": 32}, 128),
    "longrope-factor": (LONGROPE | {"original_max_position_embeddings": 32, "factor": 2.0}, 128),
    "longrope-attention-factor": (LONGROPE | {"original_max_position_embeddings": 32, "attention_factor": 1.4}, 128),
}
DYNAMIC, LONG = ROPES["dynamic"], ROPES["longrope"]


@pytest.fixture
def scaled(checkpoints, tmp_path):
    """scaled(rope, limit): a tiny Llama with these rope parameters and this max_position_embeddings."""

    def make(rope, limit):
        directory = copy_checkpoint(checkpoints, tmp_path / str(len(list(tmp_path.iterdir()))), "llama")
        change_config(directory, max_position_embeddings=limit, rope_parameters={"rope_theta": 1000.0} | rope)
        return directory

    return make


@pytest.mark.parametrize("prompt_length", [10, 20, 21, 90])
@pytest.mark.parametrize("rope", ROPES)
def test_logits_equal_transformers_below_and_beyond_the_original_limit(scaled, make_engine, rope, prompt_length):
    """Twelve tokens follow: 20 reaches the original limit of 32 exactly, and 21 goes one beyond."""
    directory = scaled(*ROPES[rope])
    engine = make_engine(model=str(directory), max_step_tokens=17)
    assert engine.info.max_model_len == 128
    assert_every_position_equals(engine, oracle_of(directory), prompt_length=prompt_length)


@pytest.mark.parametrize("prompt_length", [20, 21])
@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_rotates_a_part_of_each_head(checkpoints, tmp_path, make_engine, name, prompt_length):
    """The older names of its rope mean longrope (transformers means it too, but fails over `su`)."""
    directory = copy_checkpoint(checkpoints, tmp_path / "phi3", "phi3", pad_token_id=0, num_key_value_heads=1)
    factors = {"short_factor": [1.0, 1.3, 1.5], "long_factor": [1.2, 4.0, 9.0]}
    change_config(directory, rope_parameters=..., rope_scaling={"type": "longrope"} | factors)
    change_config(directory, partial_rotary_factor=0.75)
    change_config(directory, original_max_position_embeddings=32, max_position_embeddings=128)
    oracle = oracle_of(directory)
    change_config(directory, rope_scaling={"type": name} | factors)
    rope = load_config(directory).rope
    assert (rope.kind, rope.fraction, rope.original_max_positions) == ("longrope", 0.75, 32)
    assert_every_position_equals(make_engine(model=str(directory)), oracle, prompt_length=prompt_length)


def test_an_original_limit_beside_the_parameters_counts(scaled, make_engine):
    directory = scaled({"rope_type": "yarn", "factor": 4.0}, 128)
    change_config(directory, original_max_position_embeddings=32)
    assert load_config(directory).position_limit == 128
    assert_every_position_equals(make_engine(model=str(directory)), oracle_of(directory), prompt_length=50)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope", "default"])
def test_a_limit_that_is_scaled_already_is_not_multiplied(llama, make_engine, kind, key, place):
    """64 positions, said to be 4 times an original 16: position 63 works, 64 is refused."""
    parameters = {"original_max_position_embeddings": 16, "factor": 4.0}
    extra = {"llama3": LLAMA3, "longrope": LONGROPE}.get(kind, {})
    scaling = {} if kind == "default" else {name: extra[name] for name in extra if name != "rope_type"} | parameters
    change_config(llama, max_position_embeddings=64, rope_parameters=...)
    change_config(llama, **{place: {key: kind} | scaling})
    engine = make_engine(model=str(llama))
    assert engine.info.max_model_len == 64
    assert_every_position_equals(engine, oracle_of(llama), prompt_length=60, output_length=4)
    assert len(run(engine, [request("fits", random_tokens(63), SamplingParams(max_tokens=1))])["fits"].tokens) == 1
    with pytest.raises(ValueError, match=r"tokens: 64 prompt tokens.*64"):
        engine.add(request("long", random_tokens(64)))


@pytest.mark.parametrize(("kind", "limit"), [("linear", 256), ("dynamic", 256), ("yarn", 256), ("llama3", 64)])
def test_a_factor_extends_the_limit_where_no_original_one_is_given(llama, kind, limit):
    extra = LLAMA3 | {"original_max_position_embeddings": 16} if kind == "llama3" else {}
    change_config(llama, max_position_embeddings=64, rope_parameters=extra | {"rope_type": kind, "factor": 4.0})
    assert load_config(llama).position_limit == limit


# -- frequencies that depend on the length ----------------------------------------------------------------------------

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_a_length_dependent_rope_keeps_its_bits_chunked_batched_preempted_and_resumed(scaled, make_engine, rope):
    directory = str(scaled(*rope))
    sampling = SamplingParams(max_tokens=20, **GREEDY)
    prompt = random_tokens(30)
    alone = make_engine(model=directory)
    truth = record_logits(alone)
    tokens = run(alone, [request("x", prompt, sampling)])["x"].tokens
    # Neighbours of other lengths have other frequencies, and the same prompt in another regime is no prefix of it.
    others = [request(f"n{count}", prompt[:count], SamplingParams(max_tokens=20, **GREEDY)) for count in (8, 20, 29)]
    for settings in ({"max_step_tokens": 7}, {"kv_blocks": 24}, {"overlap": True}, {"max_model_len": 100}):
        engine = make_engine(model=directory, prefix_cache=True, **settings)
        logits = record_logits(engine)
        replies = run(engine, [*others, request("x", prompt, sampling)])
        assert replies["x"].tokens == tokens
        assert same_bits(truth, logits, "x") == 20
        logits.clear()
        resumed = run(engine, [request("x", prompt, sampling, output=tokens[:9])])["x"]
        assert resumed.tokens == tokens[9:]
        assert same_bits({key: row for key, row in truth.items() if key[1] >= 39}, logits, "x") == 11


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_a_prefix_is_shared_within_a_regime_only(scaled, make_engine, rope):
    engine = make_engine(model=str(scaled(*rope)), prefix_cache=True)

    def cached(prompt_length: int, most: int | None) -> int:
        sampling = SamplingParams(max_tokens=most, stop_token_ids=list(range(160)), temperature=0.0)
        usage = run(engine, [request("x", random_tokens(40)[:prompt_length], sampling)])["x"].usage
        return usage.cached_tokens

    assert cached(20, 5) == 0
    assert cached(20, 12) == 16, "up to the original limit all have the same frequencies"
    assert cached(20, 13) == 0
    assert cached(20, 13) == 16
    assert cached(20, 40) == (0 if rope is DYNAMIC else 16)
    assert cached(20, None) == (0 if rope is DYNAMIC else 16), "without max_tokens it may grow to the model's limit"
    assert cached(20, 4000) == 16, "beyond the model's limit nothing grows"
    assert cached(24, 104) == 20
    assert cached(24, 8) == 20


def test_the_limit_is_part_of_numerics_where_the_rope_depends_on_it(scaled, make_engine):
    for rope, same in ((DYNAMIC, False), (LONG, False), (ROPES["yarn"], True)):
        directory = str(scaled(*rope))
        wide, narrow = (make_engine(model=directory, max_model_len=limit).info.numerics for limit in (128, 100))
        assert (wide == narrow) is same


def test_a_dynamic_rope_needs_two_planes(llama):
    change_config(llama, head_dim=2, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert_config_refused(llama, "partial_rotary_factor")
