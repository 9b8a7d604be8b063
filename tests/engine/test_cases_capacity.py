"""Kinds of fault reported for schedulers and pools, on real forwards; pools of 1, 4 and 8 blocks."""

import random

import msgspec
import pytest

from engine import FinishReason, SamplingParams
from engine.validate import TooLargeError
from tests.engine.breaking import greedy, record_plans
from tests.engine.driving import poison, request, run

A, B, C = ([start + 2 * n for n in range(20)] for start in (10, 60, 101))
caches = pytest.mark.parametrize("cache", [False, True])


@pytest.fixture
def small(make_engine):
    """small(blocks, **settings): an engine with a small pool, full of NaN."""

    def make(blocks: int, **settings: object):
        engine = make_engine(kv_blocks=blocks, **settings)
        poison(engine)
        return engine

    return make


@pytest.fixture
def oracle(make_engine):
    def ask(tokens: list[int], sampling: SamplingParams) -> list[int]:
        return run(make_engine(), [request("x", tokens, sampling)])["x"].tokens

    return ask


@pytest.mark.parametrize(("blocks", "too_long"), [(8, 40), (8, 33), (4, 17), (1, 5)])
@pytest.mark.parametrize("resident", [False, True])
def test_sc_h1_a_prompt_larger_than_the_pool_is_refused_at_once(small, oracle, blocks, too_long, resident):
    engine = small(blocks, max_model_len=64, prefix_cache=True)
    if resident:
        run(engine, [request("warm", (A + B)[: blocks * 4 - 1], greedy(1))])
    with pytest.raises(TooLargeError, match=f"{blocks * 4}"):
        engine.add(request("big", [5] * too_long, greedy(None)))
    assert not engine.busy
    assert run(engine, [request("x", C[:3], greedy(1))])["x"].tokens == oracle(C[:3], greedy(1))


@pytest.mark.parametrize(("prompt", "output"), [(12, 5), (15, 2), (16, 1), (1, 16), (9, 2**31)])
def test_sc_h1_prompt_and_output_must_fit_together(small, prompt, output):
    engine = small(4)
    with pytest.raises(TooLargeError, match=f"max_tokens={output}"):
        engine.add(request("big", A[:prompt], greedy(output)))
    fits = 16 - prompt
    assert len(run(engine, [request("x", A[:prompt], greedy(fits))])["x"].tokens) == fits


@caches
@pytest.mark.parametrize("blocks", [1, 4, 8])
def test_sc_h2_one_that_outgrows_the_pool_alone_ends_with_length(small, oracle, blocks, cache):
    engine = small(blocks, prefix_cache=cache)
    tokens = (A + B)[: blocks * 3]
    reply = run(engine, [request("x", tokens, greedy(None))], most_steps=4 * blocks + 2)["x"]
    assert reply.finish_reason is FinishReason.LENGTH
    assert reply.tokens == oracle(tokens, greedy(blocks + 1)), "the last token needs no block"
    assert run(engine, [request("x", C[:2], greedy(2))])["x"].tokens == oracle(C[:2], greedy(2))


@caches
def test_sc_h2_a_prompt_that_fills_the_pool_exactly(small, oracle, cache):
    engine = small(4, prefix_cache=cache)
    for count in (None, 0):
        reply = run(engine, [request("x", A[:16], greedy(count))])["x"]
        assert reply.tokens == (oracle(A[:16], greedy(1)) if count is None else [])
        assert reply.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@caches
def test_sc_h4_exactly_max_tokens(small, oracle, count, cache):
    engine = small(8, prefix_cache=cache)
    reply = run(engine, [request("x", A[:9], greedy(count))])["x"]
    assert reply.tokens == oracle(A[:9], greedy(7))[:count]
    assert (reply.finish_reason, reply.usage.completion_tokens) == (FinishReason.LENGTH, count)


def test_sc_h4_absent_or_huge_max_tokens_end_at_the_models_limit(make_engine):
    engine = make_engine(max_model_len=20)
    for count in (None, 2**31, 2**62, 11):
        reply = run(engine, [request("x", A[:9], greedy(count))])["x"]
        assert (len(reply.tokens), reply.finish_reason) == (11, FinishReason.LENGTH)


@caches
@pytest.mark.parametrize("overlap", [False, True])
def test_sc_h5_two_that_outgrow_the_pool_together(small, oracle, cache, overlap):
    engine = small(6, prefix_cache=cache, overlap=overlap)
    replies = run(engine, [request("a", A[:7], greedy(12)), request("b", B[:7], greedy(12))])
    assert replies["a"].tokens == oracle(A[:7], greedy(12))
    assert replies["b"].tokens == oracle(B[:7], greedy(12))
    assert replies["b"].usage.preemptions >= 1
    assert replies["a"].usage.preemptions == 0
    stats = engine.stats()
    assert stats.recomputed_tokens < stats.preempted_tokens + overlap if cache else stats.recomputed_tokens > 0


def test_sc_h6_a_big_head_is_admitted_in_bounded_steps_and_tiny_ones_follow(small, oracle):
    engine = small(8, prefix_cache=True)
    plans = record_plans(engine)
    jobs = [request("long", A[:8], greedy(16)), request("big", [*B, *C[:4]], greedy(8))]
    jobs += [request(f"tiny{index}", C[index : index + 2], greedy(1)) for index in range(5)]
    replies = run(engine, jobs, most_steps=16 + 8 + 1)
    assert next(index for index, plan in enumerate(plans) if "big" in plan) <= 16
    assert all(replies[job.id].tokens == oracle(job.tokens, job.sampling) for job in jobs)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blocks", [1, 4, 8])
def test_many_jobs_in_a_tiny_pool_all_get_what_they_get_alone(small, oracle, blocks, overlap):
    generator = random.Random(blocks)
    jobs = []
    for index in range(16):
        count = generator.randint(1, max(1, blocks * 2))
        prompt = generator.choice((A, B))[: generator.randint(1, blocks * 4 - count)] if blocks > 1 else A[:2]
        drawn = SamplingParams(max_tokens=count, temperature=0.8, seed=index, ignore_eos=True)
        jobs.append(request(f"r{index}", prompt, greedy(count) if index % 2 else drawn))
    engine = small(blocks, prefix_cache=True, overlap=overlap, max_step_tokens=generator.choice((5, 64)))
    replies = run(engine, jobs, most_steps=500)
    for job in jobs:
        assert replies[job.id].tokens == oracle(job.tokens, job.sampling)
    stats = engine.stats()
    assert stats.prefix_hit_tokens == sum(reply.usage.cached_tokens for reply in replies.values())
    assert (
        stats.prefix_hit_tokens + stats.prompt_tokens == stats.prefix_prompt_tokens == sum(len(j.tokens) for j in jobs)
    )


# -- metrics, at the engine -------------------------------------------------------------------------------------------


def grows(engine):
    """A check, step by step, that no counter ever goes down (MX-H1) and the blocks always sum to the pool."""
    last: dict[str, int] = {}
    gauges = {"blocks_live", "blocks_reclaimable", "blocks_free", "running", "waiting"}

    def check(step: int, replies: dict) -> None:
        stats = engine.stats()
        assert stats.blocks_live + stats.blocks_reclaimable + stats.blocks_free == engine.pool.size
        values = msgspec.structs.asdict(stats)
        values |= {f"steps up to bound {n}": count for n, count in enumerate(values.pop("step_counts"))}
        for name, value in values.items():
            assert type(value) is int
            assert value >= (0 if name in gauges else last.get(name, 0))
            last[name] = value

    return check


def test_mx_h1_counters_only_grow_through_preemption_cancels_and_duplicates(small):
    engine = small(6, prefix_cache=True, max_step_tokens=9)
    check = grows(engine)

    def interfere(step: int, replies: dict) -> None:
        check(step, replies)
        if step in (3, 8):
            engine.cancel(f"c{step}")
        if "a" in replies and not replies["a"].ends:
            with pytest.raises(ValueError, match=r"^id: 'a' is already running"):
                engine.add(request("a", A[:7]))

    jobs = [request("a", A[:7], greedy(12)), request("b", [*A[:4], *B[:3]], greedy(12))]
    jobs += [request(f"c{step}", B[:9], greedy(2)) for step in (3, 8)]
    run(engine, jobs, between=interfere)
    assert engine.stats().preemptions > 0


def test_mx_h1_a_cancel_in_the_finishing_step_counts_nothing_twice(make_engine):
    engine = make_engine(prefix_cache=True)
    engine.add(request("x", A[:9], greedy(1)))
    engine.launch()
    engine.cancel("x")
    engine.cancel("x")
    (delta,) = engine.collect()
    assert (delta.finish_reason, delta.tokens) == (FinishReason.CANCELLED, [])
    assert engine.collect() == []
    stats = engine.stats()
    assert (stats.generation_tokens, stats.prefix_prompt_tokens, stats.blocks_live) == (0, 9, 0)


def test_mx_h2_hits_are_counted_once_at_admission(small):
    """x matches two blocks, but its tail does not fit until `long` has ended, ten steps later."""
    engine = small(8, prefix_cache=True, max_step_tokens=3)
    run(engine, [request("warm", A[:9], greedy(1))])
    hits: list[int] = []
    long, x = request("long", [*B, *C[:1]], greedy(4)), request("x", [*A[:8], *C[:8]], greedy(2))
    replies = run(engine, [long, x], between=lambda *_: hits.append(engine.stats().prefix_hit_tokens))
    assert hits[:9] == [0] * 9
    assert set(hits) == {0, 8}
    assert replies["x"].usage.cached_tokens == 8
    assert engine.stats().prefix_prompt_tokens == 9 + 21 + 16
