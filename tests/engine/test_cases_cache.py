"""Kinds of fault reported for prefix caches, on real forwards: each reply equals the one it gets alone, uncached."""

from collections.abc import Callable

import pytest

from engine import Engine
from tests.engine.breaking import greedy, record_plans
from tests.engine.driving import Reply, poison, request, run

A, B, C = ([start + 2 * n for n in range(20)] for start in (10, 60, 101))


@pytest.fixture
def warm(make_engine) -> Callable[..., Engine]:
    """warm(**settings): an engine with the prefix cache on, its KV memory full of NaN."""

    def make(**settings: object) -> Engine:
        engine = make_engine(**{"prefix_cache": True} | settings)
        poison(engine)
        return engine

    return make


@pytest.fixture
def oracle(make_engine) -> Callable[..., list[int]]:
    """oracle(tokens, count): the reply of a fresh engine without cache that does nothing else."""

    def ask(tokens: list[int], count: int, **more: object) -> list[int]:
        return alone(make_engine(), tokens, count, **more).tokens

    return ask


def alone(engine: Engine, tokens: list[int], count: int, **more: object) -> Reply:
    return run(engine, [request("x", tokens, greedy(count), **more)])["x"]


@pytest.mark.parametrize("length", [8, 12])
def test_pc_h1_a_block_given_to_another_is_a_miss_for_the_first(warm, oracle, length):
    engine = warm(kv_blocks=4)
    first = alone(engine, A[:length], 2)
    alone(engine, B[:14], 2)
    again = alone(engine, A[:length], 2)
    assert engine.stats().prefix_evictions >= length // 4
    assert again.usage.cached_tokens == 0
    assert first.tokens == again.tokens == oracle(A[:length], 2)


def test_pc_h1_blocks_change_hands_many_times_over(warm, oracle):
    engine = warm(kv_blocks=5)
    truth = {start: oracle(A[start : start + 9], 3) for start in range(6)}
    for turn in range(24):
        start = turn * 5 % 6
        assert alone(engine, A[start : start + 9], 3).tokens == truth[start]
    assert engine.stats().prefix_evictions > 20


def test_pc_h2_a_collision_of_hashes_costs_a_miss_at_most(warm, oracle, monkeypatch):
    class Colliding(tuple):
        __slots__ = ()

        def __hash__(self):
            return 1

    monkeypatch.setattr("engine.blocks.block_key", lambda parent, content: Colliding((parent, content)))
    engine = warm()
    shares_one = [*A[:4], *B[:5]]
    for tokens, cached in ((A[:9], 0), (B[:9], 0), (shares_one, 4), (A[:9], 8), (B[:9], 8), (shares_one, 8)):
        reply = alone(engine, tokens, 3)
        assert reply.tokens == oracle(tokens, 3)
        assert reply.usage.cached_tokens == cached


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16])
def test_pc_h3_a_whole_number_of_blocks_that_is_all_cached(warm, oracle, length):
    engine = warm()
    plans = record_plans(engine)
    replies = [alone(engine, A[:length], 4) for _ in range(3)]
    assert all(reply.tokens == oracle(A[:length], 4) for reply in replies)
    cached = (length - 1) // 4 * 4
    assert [reply.usage.cached_tokens for reply in replies] == [0, cached, cached]
    assert [plan["x"] for plan in plans[::4]] == [length, length - cached, length - cached]


@pytest.mark.parametrize("suffix", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("cached_blocks", [1, 2])
def test_pc_h3_suffixes_of_every_length_behind_cached_blocks(warm, oracle, suffix, cached_blocks):
    engine = warm()
    alone(engine, A[: 4 * cached_blocks], 1)
    tokens = A[: 4 * cached_blocks] + B[:suffix]
    reply = alone(engine, tokens, 6)
    assert reply.tokens == oracle(tokens, 6)
    assert reply.usage.cached_tokens == 4 * cached_blocks


@pytest.mark.parametrize("more", [[], [A[:12]], [A[:12], A], [[*A[:8], *B[:3]]]])
@pytest.mark.parametrize("budget", [64, 12, 5])
def test_pc_h5_equal_prompts_in_one_step_do_not_hit_what_is_being_computed(warm, oracle, more, budget):
    engine = warm(max_step_tokens=budget)
    prompts = [A[:12], A[:12], *more]
    replies = run(engine, [request(f"r{index}", tokens, greedy(4)) for index, tokens in enumerate(prompts)])
    for index, tokens in enumerate(prompts):
        assert replies[f"r{index}"].tokens == oracle(tokens, 4)
        if budget == 64:
            assert replies[f"r{index}"].usage.cached_tokens == 0
    stats = engine.stats()
    assert stats.prefix_hit_tokens == sum(reply.usage.cached_tokens for reply in replies.values())
    assert stats.prefix_hit_tokens + stats.prompt_tokens == sum(map(len, prompts))


def test_pc_h5_duplicates_end_up_with_one_copy_of_each_block(warm):
    engine = warm()
    run(engine, [request(f"r{index}", A[:12], greedy(1)) for index in range(5)])
    assert engine.stats().blocks_reclaimable == 3


@pytest.mark.parametrize("length", [1, 2, 4, 12, 13])
@pytest.mark.parametrize("budget", [1, 5, 11, 64])
def test_pc_h6_prompt_logprobs_of_a_warm_prompt_are_whole(warm, length, budget):
    engine = warm(max_step_tokens=budget)
    asked = greedy(2, prompt_logprobs=1, logprobs=1)
    cold = run(engine, [request("cold", A[:length], asked)])["cold"]
    alone(engine, A[:length], 2)
    hot = run(engine, [request("hot", A[:length], asked)])["hot"]
    assert hot.usage.cached_tokens == 0
    assert hot.prompt_logprobs == cold.prompt_logprobs
    assert [row and row[0] for row in hot.prompt_logprobs] == [None, *A[1:length]]
    assert (hot.tokens, hot.logprobs) == (cold.tokens, cold.logprobs)


def test_pc_h7_salts_and_tenants_do_not_share(warm, make_engine):
    engine = warm()
    owners = [{}, {"tenant": "a"}, {"tenant": "b"}, {"cache_salt": "a"}, {"tenant": "a", "cache_salt": "a"}]
    for cached in (0, 12):
        for owner in owners:
            assert alone(engine, A[:13], 1, **owner).usage.cached_tokens == cached
    shared = warm(share_across_tenants=True)
    seen = [alone(shared, A[:13], 1, **owner).usage.cached_tokens for owner in owners]
    assert seen == [0, 12, 12, 0, 12], "tenants may share when the worker says so; salts never do"


def test_pc_h7_the_model_is_part_of_the_root(make_engine, checkpoints):
    engines = [make_engine(), make_engine(kind="qwen3")]
    job = request("x", A[:4])
    roots = [engine._namespace(job) for engine in engines]
    assert roots[0] != roots[1]
    assert roots[0] == make_engine()._namespace(job)


def test_pc_h8_matched_blocks_are_pinned_and_leaves_go_first(warm, oracle):
    engine = warm(kv_blocks=6)
    alone(engine, A[:12], 1)
    tokens = [*A[:4], *B[:15]]
    reply = alone(engine, tokens, 1)
    assert reply.usage.cached_tokens == 4
    assert reply.tokens == oracle(tokens, 1)


def test_pc_h8_many_jobs_one_after_the_other_all_find_room(warm, oracle):
    engine = warm(kv_blocks=6)
    for index in range(12):
        tokens = [index + 20, *B[:7]]
        assert alone(engine, tokens, 2).tokens == oracle(tokens, 2)
    assert alone(engine, [31, *B[:7]], 2).usage.cached_tokens == 4


def test_off_is_as_if_the_feature_did_not_exist(warm, make_engine):
    jobs = [request(f"r{index}", A[: 9 + index], greedy(5)) for index in range(4)]
    off = make_engine(prefix_cache=False, kv_blocks=9)
    poison(off)
    for _ in range(2):
        replies = run(off, jobs)
        assert {reply.usage.cached_tokens for reply in replies.values()} == {0}
    stats = off.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_evictions, stats.blocks_reclaimable) == (0, 0, 0)
    assert stats.blocks_free == 9
    assert {name: reply.tokens for name, reply in run(warm(), jobs).items()} == {
        name: reply.tokens for name, reply in replies.items()
    }


def test_clearing_the_cache_under_running_requests_disturbs_nobody(warm, oracle):
    engine = warm(max_step_tokens=8)
    jobs = [request("a", A[:13], greedy(9)), request("b", A[:15], greedy(9)), request("c", B[:9], greedy(9))]

    def clear(step: int, replies: dict) -> None:
        if step % 2:
            engine.clear_cache()
            engine.check()

    replies = run(engine, jobs, between=clear)
    for job in jobs:
        assert replies[job.id].tokens == oracle(job.tokens, 9)
    engine.clear_cache()
    assert engine.stats().blocks_free == 256
    assert alone(engine, A[:13], 1).usage.cached_tokens == 0
