"""The load-bearing equivalence on SmolLM2's real weights: logits are the same bits however a request is computed.

As test_equivalence.py does on tiny checkpoints, but with two engines that all tests share, for loading takes seconds.
"""

import random

import pytest

from engine import Engine, EngineConfig, Request, SamplingParams
from tests.engine import models
from tests.engine.driving import Reply, poison, record_logits, request, run, same_bits

NEW = 14
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(
        max_tokens=NEW, temperature=0.9, seed=11, top_k=40, top_p=0.9, repetition_penalty=1.2, ignore_eos=True
    ),
}
DTYPES = ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 49152), k=count)


PROMPT = tokens(5, 37)


class RealLab:
    """An engine without cache and one with, of 8 tokens a block; `truth` is what a request gets alone in the first."""

    def __init__(self, dtype: str) -> None:
        self.plain, self.cached = (self._load(dtype, cache) for cache in (False, True))
        self._logs = {id(engine): record_logits(engine) for engine in (self.plain, self.cached)}
        self._truths: dict[str, tuple[dict, Reply]] = {}

    @staticmethod
    def _load(dtype: str, cache: bool) -> Engine:
        return Engine(
            EngineConfig(
                model=models.smollm2(), device="cpu", dtype=dtype, block_size=8, kv_blocks=24 if cache else 64,
                prefix_cache=cache, threads=1, max_step_tokens=128,
            )
        )  # fmt: skip

    def truth(self, item: Request) -> tuple[dict, Reply]:
        key = repr((item.tokens, item.sampling))
        if key not in self._truths:
            logits, replies = self.run(self.plain, item)
            self._truths[key] = logits, replies[item.id]
        return self._truths[key]

    def run(self, engine: Engine, *items: Request, budget: int = 128) -> tuple[dict, dict[str, Reply]]:
        """Logits and replies; `budget` is the step's."""
        log = self._logs[id(engine)]
        log.clear()
        engine.scheduler.max_step_tokens = budget
        replies = run(engine, items)
        return dict(log), replies

    def forget(self) -> None:
        self.cached.clear_cache()
        for engine in (self.plain, self.cached):
            poison(engine)

    def prove(self, engine: Engine, *items: Request, budget: int = 128) -> Reply:
        """The last of these requests, computed beside the others, equals its truth in every bit."""
        before = engine.stats()
        truth_logits, truth = self.truth(items[-1])
        logits, replies = self.run(engine, *items, budget=budget)
        reply = replies[items[-1].id]
        assert reply.tokens == truth.tokens
        assert same_bits(truth_logits, logits, items[-1].id) == len(truth.tokens)
        hits = engine.stats().prefix_hit_tokens - before.prefix_hit_tokens
        assert hits == sum(other.usage.cached_tokens for other in replies.values() if other.usage)
        return reply


@pytest.fixture(scope="module", params=DTYPES)
def shared_lab(request: pytest.FixtureRequest) -> RealLab:
    return RealLab(request.param)


@pytest.fixture(params=list(SAMPLINGS))
def job(request: pytest.FixtureRequest) -> Request:
    return Request(id="x", tokens=PROMPT, sampling=SAMPLINGS[request.param])


@pytest.fixture
def real(shared_lab: RealLab) -> RealLab:
    shared_lab.forget()
    return shared_lab


def cached_tokens(reply: Reply) -> int:
    assert reply.usage
    return reply.usage.cached_tokens


def test_real_weights_cold_and_warm(real, job):
    assert [cached_tokens(real.prove(real.cached, job)) for _ in range(3)] == [0, 32, 32]


def test_real_weights_second_turn(real, job):
    _, first = real.truth(job)
    real.run(real.cached, job)
    again = Request(id="x", tokens=[*PROMPT, *first.tokens, *tokens(9, 6)], sampling=job.sampling)
    assert cached_tokens(real.prove(real.cached, again)) == (37 + NEW - 1) // 8 * 8


@pytest.mark.parametrize("budget", [1, 7, 32])
def test_real_weights_in_chunks(real, job, budget):
    real.prove(real.plain, job, budget=budget)
    assert cached_tokens(real.prove(real.cached, job, budget=budget)) == 0
    assert cached_tokens(real.prove(real.cached, job, budget=budget)) == 32


def test_real_weights_batched_with_strangers(real, job):
    strangers = [request(f"s{n}", tokens(n, 2 + 5 * n), SAMPLINGS["greedy"]) for n in range(3)]
    twin = request("twin", [*PROMPT[:17], *tokens(4, 3)], SAMPLINGS["seeded"])
    real.prove(real.plain, *strangers, twin, job)
    assert cached_tokens(real.prove(real.cached, twin, job)) == 0, "what is not computed yet cannot be found"
    assert cached_tokens(real.prove(real.cached, *strangers, job)) == 32


def test_real_weights_preempted(real, job):
    rival = request("rival", tokens(3, 135), SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    before = real.cached.stats()
    reply = real.prove(real.cached, rival, request("x", PROMPT, job.sampling))
    assert reply.usage
    assert reply.usage.preemptions > 0
    after = real.cached.stats()
    assert after.preempted_tokens - before.preempted_tokens > after.recomputed_tokens - before.recomputed_tokens


@pytest.mark.parametrize("published", [1, 9])
@pytest.mark.parametrize("warm", [False, True])
def test_real_weights_resumed(real, job, published, warm):
    logits, truth = real.truth(job)
    if warm:
        real.run(real.cached, job)
    resumed = request("x", PROMPT, job.sampling, output=truth.tokens[:published])
    found, replies = real.run(real.cached, resumed, budget=13)
    assert truth.tokens[:published] + replies["x"].tokens == truth.tokens
    later = {key: row for key, row in logits.items() if key[1] >= len(PROMPT) + published}
    assert same_bits(later, found, "x") == NEW - published
    assert cached_tokens(replies["x"]) == (min(37, (37 + published - 1) // 8 * 8) if warm else 0)
