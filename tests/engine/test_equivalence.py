"""The load-bearing test: a request's logits are the same bits whatever happens around it.

Cached or not, alone or batched, chunked, preempted, beside a cancelled one, resumed, overlapped: real forwards on tiny
checkpoints, with exact hit counts, so that it cannot pass by never hitting. Every engine runs on a pool of NaN.
"""

import random

import pytest

from engine import Engine, SamplingParams
from tests.engine.driving import GREEDY, Reply, poison, record_logits, request, run, same_bits

SEEDED = SamplingParams(
    max_tokens=24, temperature=0.9, seed=11, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
    presence_penalty=0.2, frequency_penalty=0.1, ignore_eos=True,
)  # fmt: skip
LONG_GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPT = [random.Random(5).randrange(3, 160) for _ in range(41)]

pytestmark = pytest.mark.parametrize("kind", ["llama", "qwen3"])
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
samplings = pytest.mark.parametrize("sampling", [LONG_GREEDY, SEEDED], ids=["greedy", "seeded"])


def tokens(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 160) for _ in range(count)]


class Lab:
    """Engines of one model and dtype, and the request under test run alone, uncached, in a big pool: the oracle."""

    def __init__(self, make_engine, kind: str, dtype: str, sampling: SamplingParams) -> None:
        self._make, self._settings, self.sampling = make_engine, {"kind": kind, "dtype": dtype}, sampling
        self.truth_logits, self.truth = self.alone(PROMPT)

    def engine(self, **settings: object) -> Engine:
        engine = self._make(**self._settings | settings)
        poison(engine)
        return engine

    def alone(self, prompt: list[int]) -> tuple[dict, Reply]:
        engine = self.engine()
        logits = record_logits(engine)
        return logits, run(engine, [request("x", prompt, self.sampling)])["x"]

    def compare(self, logits: dict, reply: Reply, name: str = "x") -> None:
        assert reply.tokens == self.truth.tokens
        assert (
            same_bits(self.truth_logits, logits | {("x", p): row for (n, p), row in logits.items() if n == name}, "x")
            == 24
        )


@pytest.fixture
def lab(make_engine, kind, dtype, sampling) -> Lab:
    return Lab(make_engine, kind, dtype, sampling)


@dtypes
@samplings
def test_cold_and_warm_are_the_same_bits(lab):
    engine = lab.engine(prefix_cache=True)
    logits = record_logits(engine)
    cold = run(engine, [request("x", PROMPT, lab.sampling)])["x"]
    lab.compare(logits, cold)
    logits.clear()
    warm = run(engine, [request("x", PROMPT, lab.sampling)])["x"]
    lab.compare(logits, warm)
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 40)
    assert engine.stats().prefix_hit_tokens == 40
    assert engine.stats().prompt_tokens == 41 + 1


@dtypes
@samplings
def test_a_second_turn_is_the_same_bits_cached_and_not(lab):
    follow_up = PROMPT + lab.truth.tokens + tokens(9, 6)
    expected_logits, expected = lab.alone(follow_up)
    engine = lab.engine(prefix_cache=True)
    logits = record_logits(engine)
    run(engine, [request("first", PROMPT, lab.sampling)])
    reply = run(engine, [request("x", follow_up, lab.sampling)])["x"]
    assert reply.tokens == expected.tokens
    assert same_bits(expected_logits, logits, "x") == 24
    # 41 + 24 - 1 tokens have KV: the last one was sampled and never fed. 16 blocks of 4.
    assert reply.usage.cached_tokens == 64


@dtypes
@samplings
@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_chunks_of_any_size_are_the_same_bits(lab, budget):
    engine = lab.engine(max_step_tokens=budget)
    logits = record_logits(engine)
    lab.compare(logits, run(engine, [request("x", PROMPT, lab.sampling)])["x"])


@dtypes
@samplings
@pytest.mark.parametrize("cache", [False, True])
def test_batched_with_strangers_is_the_same_bits(lab, cache):
    strangers = [request(f"s{i}", tokens(i, 1 + 13 * i % 50), LONG_GREEDY) for i in range(9)]
    engine = lab.engine(prefix_cache=cache, max_step_tokens=64)
    logits = record_logits(engine)
    replies = run(engine, [*strangers[:4], request("x", PROMPT, lab.sampling), *strangers[4:]])
    lab.compare(logits, replies["x"])


@dtypes
@samplings
def test_preempted_is_the_same_bits_and_reuses_surviving_blocks(lab):
    engine = lab.engine(prefix_cache=True, kv_blocks=24)
    logits = record_logits(engine)
    rival = request("rival", tokens(3, 30), SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))
    replies = run(engine, [rival, request("x", PROMPT, lab.sampling)])
    lab.compare(logits, replies["x"])
    stats = engine.stats()
    assert replies["x"].usage.preemptions == stats.preemptions > 0
    assert stats.preempted_tokens > stats.recomputed_tokens > 0, "its surviving blocks were not reused"
    assert stats.prompt_tokens + stats.prefix_hit_tokens == stats.prefix_prompt_tokens == 71


@dtypes
@samplings
def test_beside_a_cancelled_one_is_the_same_bits(lab):
    engine = lab.engine(prefix_cache=True, max_step_tokens=16)
    logits = record_logits(engine)

    def cancel(step: int, replies: dict) -> None:
        if step in (1, 4, 9):
            engine.cancel(f"c{step}")

    doomed = [request(f"c{step}", PROMPT[: 8 + step], LONG_GREEDY) for step in (1, 4, 9)]
    replies = run(engine, [*doomed, request("x", PROMPT, lab.sampling)], between=cancel)
    lab.compare(logits, replies["x"])


@dtypes
@samplings
@pytest.mark.parametrize("published", [1, 7, 23])
@pytest.mark.parametrize("cache", [False, True])
def test_resumed_after_published_tokens_is_the_same_bits(lab, published, cache):
    engine = lab.engine(prefix_cache=cache, max_step_tokens=13)
    logits = record_logits(engine)
    resumed = request("x", PROMPT, lab.sampling, output=lab.truth.tokens[:published])
    reply = run(engine, [resumed])["x"]
    assert lab.truth.tokens[:published] + reply.tokens == lab.truth.tokens
    assert reply.usage.completion_tokens == 24
    first = len(PROMPT) + published
    later = {key: row for key, row in lab.truth_logits.items() if key[1] >= first}
    assert same_bits(later, logits, "x") == 24 - published
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.prefix_prompt_tokens, stats.resumed_tokens) == (0, 0, first)


@dtypes
@samplings
@pytest.mark.parametrize("cache", [False, True])
def test_overlapped_steps_are_the_same_bits(lab, cache):
    engine = lab.engine(prefix_cache=cache, overlap=True, kv_blocks=26, max_step_tokens=32)
    logits = record_logits(engine)
    strangers = [request(f"s{i}", tokens(i, 5 + i), GREEDY) for i in range(5)]
    replies = run(engine, [*strangers, request("x", PROMPT, lab.sampling)])
    lab.compare(logits, replies["x"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contexts_over_several_key_tiles_are_the_same_bits(make_engine, kind, dtype):
    """Past 256 keys the merge of tiles comes in: decode, one prefill, chunks and cache must still agree."""
    prompt = tokens(1, 300)
    settings = {"kind": kind, "dtype": dtype, "block_size": 16, "kv_blocks": 64}
    engine = make_engine(**settings)
    poison(engine)
    truth = record_logits(engine)
    sampling = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    whole = run(engine, [request("x", prompt, sampling)])["x"].tokens
    for budget, kept in ((512, 1), (512, 149), (64, 100), (7, 120), (300, 0)):
        other = make_engine(**settings, max_step_tokens=budget, prefix_cache=True)
        poison(other)
        run(other, [request("warm", prompt[:200], GREEDY)])
        logits = record_logits(other)
        resumed = request("x", prompt, sampling, output=whole[:kept])
        reply = run(other, [request("s", tokens(2, 270), GREEDY), resumed])["x"]
        assert whole[:kept] + reply.tokens == whole
        later = {key: row for key, row in truth.items() if key[1] >= 300 + kept}
        assert same_bits(later, logits, "x") == 150 - kept
