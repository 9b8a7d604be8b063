"""Preemption by recompute: who goes, what survives, what is counted. No torch: see scripted.py."""

import pytest

from engine.request import FinishReason
from tests.engine.scripted import Bench

A, B, C = ([start + n for n in range(12)] for start in (3, 17, 31))


def preempted(bench: Bench) -> dict[str, int]:
    return {name: sequence.preemptions for name, sequence in bench.sequences.items()}


@pytest.mark.parametrize("cache", [False, True])
def test_the_last_admitted_goes_first_and_the_oldest_never(cache):
    bench = Bench(blocks=9, cache=cache)
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        bench.add(name, tokens, max_tokens=10)
    seen: list[str] = []
    while bench.busy:
        before = preempted(bench)
        bench.step()
        seen += [name for name, count in preempted(bench).items() if count > before[name]]
    assert seen[0] == "c"
    assert "b" in seen
    assert "a" not in seen
    bench.settle()
    bench.prove()


def test_the_preempted_return_before_those_who_wait_and_in_their_order():
    bench = Bench(blocks=9, rows=4)
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        bench.add(name, tokens, max_tokens=12)
    bench.step()
    bench.add("new", [50, 51], max_tokens=1)
    while not all(bench.sequences[name].preemptions for name in "bc"):
        bench.step()
    assert [sequence.id for sequence in bench.scheduler.waiting] == ["b", "c", "new"]
    bench.run()
    bench.prove()


def test_a_step_that_preempts_admits_nobody():
    bench = Bench(blocks=5, cache=False)
    bench.add("a", A[:8], max_tokens=12)
    b = bench.add("b", B, max_tokens=4)
    bench.step()
    b.held = True  # else it would be the head of the queue, which never fits in the step that preempted it
    bench.add("tiny", C[:1], max_tokens=1)
    while not b.preemptions:
        bench.step()
    assert "tiny" not in bench.plans[-1]
    b.held = False
    bench.run()
    bench.prove()


def test_a_recompute_finds_its_own_surviving_blocks():
    """SC-H5."""
    bench = Bench(blocks=6)
    bench.add("a", A[:7], max_tokens=10)
    bench.add("b", B[:7], max_tokens=10)
    bench.run()
    counters = bench.scheduler.counters
    assert (counters.preemptions, counters.preempted_tokens) == (1, 12)
    gap = next(index for index, plan in enumerate(bench.plans) if "b" not in plan)
    assert next(plan["b"] for plan in bench.plans[gap:] if "b" in plan) == 5, "a took one of its three full blocks"
    assert counters.recomputed_tokens == 4
    bench.prove()


def test_without_cache_all_is_computed_again_and_counted_apart():
    bench = Bench(blocks=6, cache=False)
    bench.add("a", A[:7], max_tokens=14)
    bench.add("b", B[:7], max_tokens=14)
    bench.run()
    counters = bench.scheduler.counters
    assert counters.preemptions == preempted(bench)["b"] > 0
    assert counters.prompt_tokens == counters.prefix_prompt_tokens == 14
    assert counters.recomputed_tokens == counters.preempted_tokens > 0
    assert counters.generation_tokens == 28
    bench.prove()


@pytest.mark.parametrize("cache", [False, True])
def test_one_preempted_in_flight_keeps_the_token_it_sampled(cache):
    bench = Bench(blocks=5, depth=2, cache=cache)
    bench.add("a", A[:7], max_tokens=8)
    bench.add("b", B[:7], max_tokens=8)
    caught = False
    while bench.busy:
        bench.launch()
        b = bench.sequences["b"]
        if b.row < 0 and b.in_flight and not caught:
            caught, known = True, b.output_length
            bench.collect()
            assert b.output_length == known + 1
            assert b.kv == 0, "its blocks are gone: nothing of them is published"
        elif len(bench.launched) == 2 or bench.launched:
            bench.collect()
        if not caught:
            bench.launch()
    assert caught
    bench.settle()
    bench.prove()


def test_one_that_is_alone_never_preempts_itself_for_ever():
    """SC-H2: with max_tokens absent it ends with `length` when the pool is full."""
    bench = Bench(blocks=4)
    bench.add("a", A, max_tokens=None)
    bench.run(most=6)
    assert bench.told["a"].reason is FinishReason.LENGTH
    assert len(bench.told["a"].tokens) == 16 + 1 - 12, "the last token needs no block of its own"
    bench.add("b", B[:3])
    bench.run()
    bench.prove()


def test_one_that_outgrows_the_pool_gives_way_to_its_elders_and_still_gets_all():
    bench = Bench(blocks=4)
    bench.add("a", A[:4], max_tokens=8)
    bench.add("b", B[:4], max_tokens=None)
    bench.run()
    assert len(bench.told["b"].tokens) == 16 + 1 - 4
    bench.prove()


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_two_that_need_the_whole_pool_take_turns_in_bounded_steps(blocks):
    bench = Bench(blocks=blocks, cache=True)
    most = blocks * 4
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        bench.add(name, tokens[:3], max_tokens=most - 3)
    bench.run(most=3 * most * 3)
    bench.prove()


def test_preempted_while_its_prompt_is_being_computed():
    bench = Bench(blocks=6, budget=4, cache=True)
    bench.add("a", A[:4], max_tokens=12)
    bench.add("b", [*B, *C[:3]], max_tokens=2)
    while not bench.sequences["b"].preemptions:
        bench.step()
    assert bench.sequences["b"].output_length == 0
    bench.run()
    counters = bench.scheduler.counters
    assert counters.prompt_tokens == counters.prefix_prompt_tokens == 19
    bench.prove()


def test_counts_stay_exact_when_the_return_finds_more_than_was_computed():
    """MX-H1: b is preempted with one prompt token computed, and returns when a has registered their common part."""
    bench = Bench(blocks=10, budget=15)
    bench.add("first", C[:4], max_tokens=12)
    while len(bench.plans) < 4:
        bench.step()
    bench.add("a", [*A, 50], max_tokens=6)
    bench.add("b", [*A, 51, 52], max_tokens=2)
    bench.step()
    assert bench.plans[-1] == {"first": 1, "a": 13, "b": 1}
    totals: list[int] = []
    while bench.busy:
        bench.step()
        counters = bench.scheduler.counters
        totals.append(counters.prompt_tokens + counters.prefix_hit_tokens)
    assert bench.sequences["b"].preemptions == 1
    assert totals == sorted(totals)
    assert totals[-1] == counters.prefix_prompt_tokens == 4 + 13 + 14
    assert counters.prefix_hit_tokens == sum(max(told.cached) for told in bench.told.values()) == 0
    bench.settle()
    bench.prove()


@pytest.mark.parametrize("budget", [2, 5, 64])
def test_prompt_logprobs_survive_a_preemption(budget):
    bench = Bench(blocks=6, budget=budget)
    bench.add("a", A[:4], max_tokens=17)
    bench.add("b", [*B, *C[:3]], max_tokens=3, prompt_logprobs=0)
    bench.run()
    assert bench.sequences["b"].preemptions
    (rows,) = bench.told["b"].prompt_logprobs
    assert [row and row[0] for row in rows] == [None, *B[1:], *C[:3]]
    bench.prove()


def test_resumed_output_is_never_counted_as_prompt_or_hit():
    bench = Bench(budget=5)
    whole = bench.add("whole", A, max_tokens=9)
    bench.run()
    before = bench.scheduler.counters.prompt_tokens
    bench.add("resumed", A, max_tokens=9, output=bench.told["whole"].tokens[:5])
    bench.run()
    assert bench.told["whole"].tokens[:5] + bench.told["resumed"].tokens == bench.told["whole"].tokens
    counters = bench.scheduler.counters
    assert (counters.prompt_tokens, counters.prefix_prompt_tokens) == (before, whole.prompt_length)
    assert counters.prefix_hit_tokens == 0
    assert counters.resumed_tokens == 17 - 16, "four blocks were still there"
    assert bench.told["resumed"].ends[0].usage.completion_tokens == 9
    bench.prove()
