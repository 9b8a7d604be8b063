"""What `add` and the configuration refuse: every ValueError names the field and the value, and changes nothing."""

import math

import pytest
import torch
from msgspec.structs import replace

from engine import EngineConfig, Request, SamplingParams
from engine.validate import TooLargeError, validate_config, validate_request, validate_sampling
from tests.engine.driving import GREEDY, request, run
from tests.engine.scripted import engine_info

INFO = engine_info(vocab_size=100, max_model_len=32, block_size=4, kv_blocks=6, capacity_tokens=24)
NAN, INF = math.nan, math.inf

BAD_SAMPLING = [
    *(("max_tokens", value) for value in (-1, "5", 1.5, True, NAN)),
    *(("min_tokens", value) for value in (-1, "5", 0.5, False, None)),
    *(("temperature", value) for value in (-0.1, NAN, INF, "1", True)),
    *(("top_p", value) for value in (0, 0.0, -0.5, 1.1, NAN, "0.9", INF)),
    *(("top_k", value) for value in (-2, 1.5, "3", True, None)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, "0.1")),
    *(("seed", value) for value in (-1, 2**64, 1.0, "7", True)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN, "1")),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN, "1")),
    *(("repetition_penalty", value) for value in (0, -1.0, NAN, INF, "1")),
    *(("logprobs", value) for value in (-1, 21, 1.0, "1", True)),
    *(("prompt_logprobs", value) for value in (-1, 21, 1.0, "1", True)),
]
GOOD_SAMPLING = [
    *(("max_tokens", value) for value in (None, 0, 1, 2**31, 2**63)),
    *(("temperature", value) for value in (0, 0.0, 1e-30, 1, 2.5, 1e6)),
    *(("top_p", value) for value in (1e-9, 0.5, 1, 1.0)),
    *(("top_k", value) for value in (-1, 0, 1, 10**9)),
    *(("min_p", value) for value in (0, 0.0, 1.0)),
    *(("seed", value) for value in (None, 0, 2**63, 2**64 - 1)),
    *(("presence_penalty", value) for value in (-2, 2.0)),
    *(("frequency_penalty", value) for value in (-2.0, 2)),
    *(("repetition_penalty", value) for value in (0.01, 1, 3.0)),
    *(("logprobs", value) for value in (None, 0, 20)),
    *(("prompt_logprobs", value) for value in (None, 0, 20)),
]
BAD_REQUESTS = [
    ({"tokens": []}, "tokens", "none"),
    ({"tokens": [5, -1, 6]}, "tokens", "-1"),
    ({"tokens": [5, 100]}, "tokens", "100"),
    ({"tokens": [2**40]}, "tokens", str(2**40)),
    ({"tokens": [5, "6"]}, "tokens", "'6'"),
    ({"tokens": [5, 1.5]}, "tokens", "1.5"),
    ({"tokens": [True]}, "tokens", "True"),
    ({"tokens": [None]}, "tokens", "None"),
    ({"output": [100]}, "output", "100"),
    ({"output": [-1]}, "output", "-1"),
    ({"adapter": "lora"}, "adapter", "'lora'"),
    ({"cache_salt": ""}, "cache_salt", "empty"),
    ({"tenant": ""}, "tenant", "empty"),
    ({"sampling": SamplingParams(stop_token_ids=[3, 100])}, "stop_token_ids", "100"),
    ({"sampling": SamplingParams(stop_token_ids=[-3])}, "stop_token_ids", "-3"),
    ({"sampling": SamplingParams(logit_bias={100: 1.0})}, "logit_bias", "100"),
    ({"sampling": SamplingParams(logit_bias={-1: 1.0})}, "logit_bias", "-1"),
    ({"sampling": SamplingParams(logit_bias={3: NAN})}, "logit_bias[3]", "nan"),
    ({"sampling": SamplingParams(logit_bias={3: 1e39})}, "logit_bias[3]", "1e+39"),
    ({"sampling": SamplingParams(logit_bias={3: -INF})}, "logit_bias[3]", "-inf"),
    ({"sampling": SamplingParams(min_tokens=6, max_tokens=5)}, "min_tokens", "6"),
    ({"sampling": SamplingParams(max_tokens=4), "output": [5] * 4}, "output", "4"),
    ({"sampling": SamplingParams(max_tokens=4), "output": [5] * 9}, "output", "9"),
    ({"sampling": SamplingParams(max_tokens=0), "output": [5]}, "output", "1"),
]
TOO_LARGE = [
    ({"tokens": [5] * 32}, "tokens: 32 prompt tokens", "32"),
    ({"tokens": [5] * 25}, "tokens: 25 positions", "24"),
    ({"tokens": [5] * 20, "output": [6] * 5}, "tokens: 25 positions", "24"),
    ({"tokens": [5] * 20, "sampling": SamplingParams(max_tokens=5)}, "max_tokens=5: 25 positions", "24"),
    ({"tokens": [5] * 3, "sampling": SamplingParams(max_tokens=2**31)}, f"max_tokens={2**31}: 32 positions", "24"),
    ({"tokens": [5] * 32, "sampling": SamplingParams(max_tokens=0)}, "tokens: 32 prompt tokens", "32"),
]


def make(**fields: object) -> Request:
    return Request(**{"id": "x", "tokens": [5, 6]} | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_a_bad_sampling_value_is_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: ") as refused:
        validate_sampling(SamplingParams(**{field: value}))
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize(("field", "value"), GOOD_SAMPLING)
def test_a_good_sampling_value_is_taken(field, value):
    validate_sampling(SamplingParams(**{field: value}))


@pytest.mark.parametrize(("fields", "name", "value"), BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name_and_value(fields, name, value):
    with pytest.raises(ValueError) as refused:
        validate_request(make(**fields), INFO)
    assert str(refused.value).startswith(f"{name}: ")
    assert value in str(refused.value)
    assert not isinstance(refused.value, TooLargeError)


@pytest.mark.parametrize(("fields", "what", "limit"), TOO_LARGE)
def test_what_can_never_fit_is_too_large_and_says_by_how_much(fields, what, limit):
    with pytest.raises(TooLargeError) as refused:
        validate_request(make(**fields), INFO)
    assert what in str(refused.value)
    assert limit in str(refused.value)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limit"),
    [(2, 5, 7), (2, 0, 2), (20, 4, 24), (23, 1, 24), (2, None, 25), (24, None, 25), (24, 0, 24)],
)
def test_the_limit_is_where_the_reply_must_end(prompt, max_tokens, limit):
    """With max_tokens absent the last token may be sampled with the pool full: it needs no block."""
    assert validate_request(make(tokens=[5] * prompt, sampling=SamplingParams(max_tokens=max_tokens)), INFO) == limit


def test_the_model_limit_caps_a_larger_max_tokens():
    roomy = replace(INFO, kv_blocks=64, capacity_tokens=256)
    assert validate_request(make(sampling=SamplingParams(max_tokens=2**31)), roomy) == 32
    assert validate_request(make(sampling=SamplingParams()), roomy) == 32
    assert validate_request(make(tokens=[5] * 31), roomy) == 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, value)
            for name in ("block_size", "max_sequences", "max_step_tokens", "kv_blocks", "kv_memory", "threads")
            for value in (0, -1, 1.5, "4", False)
        ),
        *(("gpu_memory", value) for value in (0, -0.5, float("inf"), "4", True)),
        *((name, value) for name in ("deterministic", "overlap") for value in ("on", "", None, 2)),
        *(("device", value) for value in ("gpu", "", None)),
        *(("dtype", value) for value in ("float8", "torch.bfloat16", None)),
        *(("seed", value) for value in (-1, 2**64)),
    ],
)
def test_a_bad_setting_is_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: ") as refused:
        validate_config(EngineConfig(model="m", **{field: value}))
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_blocks": 0}, "kv_blocks: a whole number of at least 1 expected, got 0"),
        ({"kv_blocks": -1}, "kv_blocks: a whole number of at least 1 expected, got -1"),
        ({"kv_blocks": None, "kv_memory": 10}, "kv_memory: 10 bytes"),
        ({"kv_blocks": None, "kv_memory": 0}, "kv_memory: a whole number of at least 1 expected, got 0"),
        ({"max_model_len": 0}, "max_model_len: 1 to 512 (the model's limit) expected, got 0"),
        ({"max_model_len": 513}, "max_model_len: 1 to 512 (the model's limit) expected, got 513"),
        ({"device": "cuda"}, "device: 'cuda'"),
        ({"max_sequences": 0}, "max_sequences: a whole number of at least 1 expected, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(make_engine, settings, said):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError) as refused:
        make_engine(**settings)
    assert said in str(refused.value)


def test_a_refused_request_leaves_no_trace_and_its_neighbour_alone(make_engine):
    """SC-H3, SC-H4 at the engine's door."""
    engine = make_engine(kv_blocks=8)
    truth = run(engine, [request("beside", range(10, 20))])["beside"].tokens
    engine.add(request("beside", range(10, 20)))
    stats = engine.stats()
    for fields in (
        {"tokens": []},
        {"tokens": [10**6]},
        {"tokens": [5] * 40},
        {"sampling": SamplingParams(max_tokens=-1)},
    ):
        with pytest.raises(ValueError, match="tokens"):
            engine.add(make(**fields))
    with pytest.raises(ValueError, match=r"^id: 'beside' is already running"):
        engine.add(request("beside", [5]))
    assert engine.stats() == stats
    assert run(engine)["beside"].tokens == truth
    assert run(engine, [make(sampling=GREEDY)])["x"].usage.completion_tokens == 8
