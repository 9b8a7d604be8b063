"""Failing forwards and numbers that are none, at each phase: one request ends, nothing of it is found again."""

import math

import pytest

from engine import FinishReason
from tests.engine.breaking import failing_forward, greedy, nan_embedding, nan_logits
from tests.engine.driving import poison, request, run

A, B = ([start + 2 * n for n in range(20)] for start in (10, 61))
POISONOUS = 3  # a token that is in no prompt but those that say so


@pytest.fixture
def engine(make_engine):
    engine = make_engine(prefix_cache=True)
    poison(engine)
    return engine


@pytest.fixture
def truth(make_engine):
    def ask(tokens: list[int], count: int) -> list[int]:
        return run(make_engine(), [request("x", tokens, greedy(count))])["x"].tokens

    return ask


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("settings", [{}, {"max_step_tokens": 4}, {"overlap": True}, {"prefix_cache": False}])
def test_pc_h4_a_forward_that_fails_in_any_phase_publishes_nothing_of_its_step(make_engine, truth, step, settings):
    """In the first chunk, a later one, the first decode and later ones: one error, then the same from nothing."""
    engine = make_engine(**{"prefix_cache": True} | settings)
    poison(engine)
    with failing_forward(engine, step):
        reply = run(engine, [request("a", A[:9], greedy(6))])["a"]
    assert (reply.finish_reason, reply.ends) == (FinishReason.ERROR, 1)
    assert "injected into the forward" in reply.error
    assert reply.tokens == truth(A[:9], 6)[: len(reply.tokens)]
    assert engine.stats().blocks_reclaimable == 0
    again = run(engine, [request("b", A[:9], greedy(6))])["b"]
    assert again.tokens == truth(A[:9], 6)
    assert again.usage.cached_tokens == 0


def test_pc_h4_a_failure_leaves_the_cached_prefix_of_others_alone(engine, truth):
    run(engine, [request("warm", A[:13], greedy(1))])
    run(engine, [request("stranger", B[:9], greedy(1))])
    with failing_forward(engine, 0):
        run(engine, [request("a", [*A[:8], *B[:6]], greedy(4))])
    assert run(engine, [request("stranger", B[:9], greedy(3))])["stranger"].usage.cached_tokens == 8
    assert run(engine, [request("a", [*A[:8], *B[:6]], greedy(4))])["a"].tokens == truth([*A[:8], *B[:6]], 4)


def test_a_failed_step_ends_all_its_requests_and_spares_those_that_wait(make_engine, truth):
    engine = make_engine(prefix_cache=True, max_sequences=2)
    jobs = [request(name, A[n : n + 9], greedy(4)) for n, name in enumerate("abc")]
    with failing_forward(engine, 2):
        replies = run(engine, jobs)
    assert [replies[name].finish_reason for name in "abc"] == ["error", "error", "length"]
    assert replies["c"].tokens == truth(A[2:11], 4)
    assert str(engine.failure) == "injected into the forward"


def test_one_that_stood_still_in_the_failed_step_goes_on(make_engine, truth):
    engine = make_engine(prefix_cache=True)
    engine.add(request("held", A[:9], greedy(8)))
    engine.add(request("twin", A[:9], greedy(8)))
    got = {delta.id: list(delta.tokens) for delta in engine.step()}
    engine.hold("held")
    with failing_forward(engine, 0):
        engine.step()
    engine.unhold("held")
    replies = run(engine, [request("stranger", B[:17], greedy(3))])
    assert got["held"] + replies["held"].tokens == truth(A[:9], 8)
    assert replies["stranger"].tokens == truth(B[:17], 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("tokens_before", [0, 1, 4])
def test_nan_in_one_row_ends_that_request_and_its_neighbours_do_not_notice(engine, truth, value, tokens_before):
    neighbours = [request(f"n{index}", B[index : index + 7], greedy(9)) for index in range(3)]
    jobs = [*neighbours[:2], request("x", A[:9], greedy(9)), neighbours[2]]
    for job in jobs:
        engine.add(job)
    tokens: dict[str, list[int]] = {job.id: [] for job in jobs}

    def step() -> None:
        for delta in engine.step():
            tokens[delta.id] += delta.tokens

    for _ in range(tokens_before):
        step()
    with nan_logits(engine, ["x"], value):
        replies = run(engine)
    assert replies["x"].finish_reason is FinishReason.ERROR
    assert "not finite" in replies["x"].error
    assert replies["x"].tokens == [], "no token of a broken row is told"
    assert tokens["x"] == truth(A[:9], 9)[:tokens_before]
    for job in neighbours:
        assert tokens[job.id] + replies[job.id].tokens == truth(job.tokens, 9)
    again = run(engine, [request("x", A[:9], greedy(9))])["x"]
    assert (again.tokens, again.usage.cached_tokens) == (truth(A[:9], 9), 0)


@pytest.mark.parametrize("at", [0, 3, 4, 8])
@pytest.mark.parametrize("budget", [3, 4, 64])
def test_nan_that_went_into_kv_is_never_found_again(make_engine, truth, at, budget):
    """One position's KV is NaN; the prompt is computed in chunks, whose blocks were registered before anyone knew."""
    engine = make_engine(prefix_cache=True, max_step_tokens=budget)
    poison(engine)
    prompt = [*A[:at], POISONOUS, *A[at:8]]
    with nan_embedding(engine, POISONOUS):
        replies = run(engine, [request("x", prompt, greedy(4)), request("beside", B[:9], greedy(4))])
    assert replies["x"].finish_reason is FinishReason.ERROR
    assert replies["beside"].tokens == truth(B[:9], 4)
    again = run(engine, [request("again", prompt, greedy(4))])["again"]
    assert again.tokens == truth(prompt, 4)


@pytest.mark.parametrize("how", ["prompt only", "cancelled"])
def test_nan_is_never_found_again_when_no_row_was_sampled(make_engine, truth, how):
    """A prompt that is only run, or cancelled before its last chunk: its blocks are matched by whoever comes next."""
    engine = make_engine(prefix_cache=True, max_step_tokens=8)
    prompt = [POISONOUS, *A[:11]]
    with nan_embedding(engine, POISONOUS):
        engine.add(request("x", prompt, greedy(0)))
        engine.step()
        if how == "cancelled":
            engine.cancel("x")
        run(engine)
    again = run(engine, [request("again", prompt, greedy(4))])["again"]
    assert again.tokens == truth(prompt, 4)


def test_nan_in_prompt_logprobs_ends_that_request(engine):
    prompt = [*A[:5], POISONOUS, *A[5:8]]
    with nan_embedding(engine, POISONOUS):
        reply = run(engine, [request("x", prompt, greedy(0, prompt_logprobs=1))])["x"]
    assert reply.finish_reason is FinishReason.ERROR
    assert reply.prompt_logprobs is None


def test_errors_leave_rows_and_blocks_for_a_hundred_more(make_engine):
    engine = make_engine(prefix_cache=True, kv_blocks=8, max_sequences=2)
    for index in range(100):
        with nan_logits(engine, ["bad"]):
            name = "bad" if index % 2 else "good"
            reply = run(engine, [request(name, [5 + index % 9, *A[:7]], greedy(3))])[name]
        assert reply.finish_reason is (FinishReason.ERROR if index % 2 else FinishReason.LENGTH)
