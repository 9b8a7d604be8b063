"""The load-bearing test again, for attention with windows and scores with a soft-cap: the same bits, come what may."""

import pytest

from engine import FinishReason, SamplingParams
from tests.engine.breaking import nan_embedding
from tests.engine.driving import GREEDY, record_logits, request, run, same_bits
from tests.engine.families import random_tokens

MODELS = {
    "windowed": ("mistral", {"sliding_window": 7}),
    "capped": (
        "gemma2",
        {"sliding_window": 11, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "head_dim": 16},
    ),
    "wide-window": (
        "ministral",
        {"sliding_window": 270, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
PROMPT, SEEDED = random_tokens(41, seed=5), SamplingParams(max_tokens=24, temperature=0.9, seed=11, ignore_eos=True)
WAYS = {
    "chunks of 1": {"max_step_tokens": 1},
    "chunks of 7": {"max_step_tokens": 7},
    "chunks of 64": {"max_step_tokens": 64},
    "preempted": {"kv_blocks": 26},
    "overlapped": {"overlap": True, "max_step_tokens": 32},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["windowed", "capped"])
def test_windows_and_soft_caps_are_the_same_bits_in_all_ways(checkpoints, make_engine, name, dtype):
    kind, changes = MODELS[name]
    settings = {"model": str(checkpoints(kind, **changes)[0]), "dtype": dtype}
    engine = make_engine(**settings)
    truth = record_logits(engine)
    whole = run(engine, [request("x", PROMPT, SEEDED)])["x"].tokens
    strangers = [request(f"s{i}", random_tokens(1 + 13 * i % 50, seed=i), GREEDY) for i in range(5)]
    rival = request("rival", random_tokens(30, seed=9), SamplingParams(max_tokens=50, ignore_eos=True))
    for way, special in WAYS.items():
        engine = make_engine(**settings, prefix_cache=True, **special)
        logits = record_logits(engine)
        first = [rival] if way == "preempted" else strangers
        assert run(engine, [*first, request("x", PROMPT, SEEDED)])["x"].tokens == whole, way
        assert same_bits(truth, logits, "x") == 24
        assert (engine.stats().preemptions > 0) is (way == "preempted")
        logits.clear()
        warm = run(engine, [request("x", PROMPT, SEEDED)])["x"]
        assert (warm.tokens, warm.usage.cached_tokens) == (whole, 40)
        assert same_bits(truth, logits, "x") == 24
        logits.clear()
        resumed = run(engine, [request("x", PROMPT, SEEDED, output=whole[:9], cache_salt="cold")])["x"]
        assert whole[:9] + resumed.tokens == whole
        assert same_bits({key: row for key, row in truth.items() if key[1] >= 50}, logits, "x") == 15


def test_windows_over_several_key_tiles_are_the_same_bits(checkpoints, make_engine):
    """A window of 270 begins and ends in the middle of tiles, and moves over their borders as the reply grows."""
    kind, changes = MODELS["wide-window"]
    settings = {"model": str(checkpoints(kind, **changes)[0]), "block_size": 16, "kv_blocks": 64}
    prompt, sampling = random_tokens(300), SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    engine = make_engine(**settings)
    truth = record_logits(engine)
    whole = run(engine, [request("x", prompt, sampling)])["x"].tokens
    for budget, kept in ((512, 1), (512, 99), (64, 70), (7, 90)):
        other = make_engine(**settings, max_step_tokens=budget, prefix_cache=True)
        run(other, [request("warm", prompt[:200], GREEDY)])
        logits = record_logits(other)
        reply = run(
            other, [request("s", random_tokens(270, 2), GREEDY), request("x", prompt, sampling, output=whole[:kept])]
        )
        assert whole[:kept] + reply["x"].tokens == whole
        assert same_bits({k: row for k, row in truth.items() if k[1] >= 300 + kept}, logits, "x") == 100 - kept


@pytest.mark.parametrize("budget", [299, 512])
@pytest.mark.parametrize("bad", [2, 40])
def test_a_nan_that_no_later_window_sees_spoils_no_cache(checkpoints, make_engine, budget, bad):
    """Its position's KV is not finite, yet the end of its chunk is: its blocks must not go to the next request.

    299 tokens are a chunk that samples nothing; 512 hold the whole prompt. Within a tile of 256 keys a NaN spreads (it
    is multiplied by a weight of zero), so the chunk ends in the next one.
    """
    directory = str(checkpoints("mistral", sliding_window=3)[0])
    prompt = [token % 140 + 3 for token in random_tokens(300)]
    prompt[bad] = 150
    clean = run(make_engine(model=directory), [request("x", prompt, GREEDY)])["x"].tokens
    engine = make_engine(model=directory, prefix_cache=True, max_step_tokens=budget)
    with nan_embedding(engine, 150):
        broken = run(engine, [request("broken", prompt, GREEDY)])["broken"]
    assert broken.finish_reason is FinishReason.ERROR
    assert "not finite" in broken.error
    reply = run(engine, [request("x", prompt, GREEDY)])["x"]
    assert (reply.tokens, reply.usage.cached_tokens) == (clean, 0)
