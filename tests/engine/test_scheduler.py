"""Planning: budget, admission, the cache's share in both, capacity, preemption. No torch: see scripted.py."""

import pytest

from engine.request import FinishReason
from engine.validate import TooLargeError
from tests.engine.scripted import Bench

A, B, C = ([start + n for n in range(12)] for start in (3, 17, 31))


def test_a_prompt_is_computed_once_and_each_token_costs_one_step():
    bench = Bench()
    bench.add("a", A, max_tokens=3)
    bench.run()
    assert bench.plans == [{"a": 12}, {"a": 1}, {"a": 1}]
    bench.prove()


def test_one_token_needs_one_step():
    bench = Bench()
    bench.add("a", A, max_tokens=1)
    bench.run()
    assert bench.plans == [{"a": 12}]
    bench.prove()


def test_no_tokens_at_all_runs_the_prompt_only():
    bench = Bench(budget=5)
    bench.add("a", A, max_tokens=0)
    bench.run()
    assert bench.plans == [{"a": 5}, {"a": 5}, {"a": 2}]
    assert bench.told["a"].tokens == []
    assert bench.told["a"].reason is FinishReason.LENGTH
    bench.add("b", A, max_tokens=1)
    bench.run()
    assert bench.told["b"].cached == {8}, "a prompt that was only run warms the cache"


def test_chunks_share_a_step_with_decodes_and_never_stall_them():
    bench = Bench(budget=5)
    bench.add("a", A[:4], max_tokens=6)
    bench.step()
    bench.add("b", B, max_tokens=2)
    bench.run()
    assert bench.plans == [{"a": 4}, {"a": 1, "b": 4}, {"a": 1, "b": 4}, {"a": 1, "b": 4}, {"a": 1, "b": 1}, {"a": 1}]
    bench.prove()


def test_admission_is_first_come_first_served():
    bench = Bench(rows=2)
    for name, tokens in (("a", A), ("b", B), ("c", C[:1]), ("d", C[:2])):
        bench.add(name, tokens, max_tokens=2)
    bench.run()
    assert [sorted(plan) for plan in bench.plans] == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]


def test_a_warm_request_does_not_overtake_a_cold_one():
    bench = Bench(rows=1)
    bench.add("warm", A)
    bench.run()
    bench.plans.clear()
    bench.add("cold", B, max_tokens=1)
    bench.add("hit", A, max_tokens=1)
    bench.run()
    assert bench.plans == [{"cold": 12}, {"hit": 4}]


def test_only_the_uncached_suffix_costs_budget():
    bench = Bench(budget=6)
    bench.add("a", A, max_tokens=1)
    bench.run()
    bench.plans.clear()
    bench.add("b", [*A[:8], 50, 51], max_tokens=1)
    bench.add("c", [*A[:8], 52, 53, 54], max_tokens=1)
    bench.run()
    assert bench.plans == [{"b": 2, "c": 3}]
    assert (bench.told["b"].cached, bench.told["c"].cached) == ({8}, {8})
    bench.prove()


def test_a_table_starts_with_the_blocks_that_were_matched():
    bench = Bench()
    first = bench.add("a", A, max_tokens=1)
    bench.launch()
    table = list(first.table)
    bench.collect()
    second = bench.add("b", [*A[:9], 55], max_tokens=2)
    bench.launch()
    assert second.table[:2] == table[:2]
    assert second.table[2] != table[2]
    bench.run()
    bench.prove()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12])
def test_one_token_always_prefills_however_warm(length):
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.add(name, A[:length], max_tokens=3)
        bench.run()
    cached = (length - 1) // 4 * 4
    assert (bench.told["b"].cached, bench.told["c"].cached) == ({cached}, {cached})
    assert next(plan for plan in bench.plans if "b" in plan) == {"b": length - cached}
    bench.prove()


def test_the_whole_prompt_must_fit_at_admission():
    bench = Bench(blocks=5, budget=4)
    bench.add("a", A[:8], max_tokens=8)
    bench.step()
    bench.step()
    later = bench.add("b", B, max_tokens=4)  # three blocks; two are left, and its first chunk would fit
    bench.step()
    assert later.row < 0
    assert bench.scheduler.counters.preemptions == 0
    bench.run()
    bench.prove()


def test_a_cached_prefix_counts_towards_what_fits():
    bench = Bench(blocks=5)
    bench.add("a", A[:8], max_tokens=9)
    bench.step()
    bench.add("b", [*A[:8], 50], max_tokens=1)  # three blocks in all, but two are a's: one more is enough
    bench.step()
    assert bench.plans[1] == {"a": 1, "b": 1}
    bench.run()
    bench.prove()


def test_matched_blocks_are_pinned_before_fresh_ones_are_taken():
    bench = Bench(blocks=6)
    bench.add("a", A, max_tokens=1)
    bench.run()
    bench.add("b", [*A[:4], *B, *C[:4]], max_tokens=4)  # matches one block, needs four fresh ones and one to grow
    bench.run()
    assert bench.told["b"].cached == {4}
    assert bench.scheduler.counters.preemptions == 0
    bench.prove()


@pytest.mark.parametrize("blocks", [1, 2, 8])
@pytest.mark.parametrize("resident", [False, True])
def test_what_can_never_fit_is_refused_at_once_whatever_is_resident(blocks, resident):
    bench = Bench(blocks=blocks)
    if resident:
        bench.add("warm", [*A, *B, *C][: blocks * 4 - 1], max_tokens=1)
        bench.run()
    room = blocks * 4
    with pytest.raises(TooLargeError, match=f"{room + 1} positions in all, but the KV pool holds {room}"):
        bench.add("no", [5] * room, max_tokens=1)
    bench.add("yes", [5] * (room - 1), max_tokens=1)
    bench.run()
    bench.prove()


def test_resident_blocks_never_keep_a_request_waiting():
    bench = Bench(blocks=4)
    bench.add("warm", [*A, 50], max_tokens=2)
    bench.run()
    assert bench.pool.counts.reclaimable == 3
    bench.add("big", [*B, 51], max_tokens=3)
    bench.add("small", C[:2], max_tokens=1)
    bench.step()
    assert bench.plans[-1] == {"big": 13}, "admitted at once: three idle blocks are given up for it"
    bench.run()
    bench.prove()


def test_nothing_is_held_by_a_request_that_waits():
    bench = Bench(blocks=4)
    bench.add("warm", A[:4], max_tokens=1)
    bench.run()
    bench.add("a", B[:9], max_tokens=6)
    bench.step()
    bench.add("waits", [*A[:4], 50, 51], max_tokens=1)
    for _ in range(3):
        live, sequence = bench.pool.counts.live, bench.sequences["waits"]
        bench.step()
        assert (sequence.table, sequence.row) == ([], -1)
        assert bench.pool.counts.live >= live
    assert bench.scheduler.counters.prefix_hit_tokens == 0
    bench.run()
    bench.prove()


def test_the_watermark_holds_only_while_another_runs():
    bench = Bench(blocks=200)
    assert bench.scheduler.watermark == 2
    bench.add("a", [5] * 4, max_tokens=3)
    bench.step()
    bench.add("b", [6] * (4 * 197 + 1), max_tokens=1)  # 198 blocks; 199 are left, and two are kept for a to grow
    bench.step()
    assert bench.plans[-1] == {"a": 1}
    bench.run()
    bench.add("c", [7] * (4 * 200 - 1), max_tokens=1)
    bench.run()
    bench.prove()


def test_prompt_logprobs_are_computed_in_full_and_what_they_compute_is_matchable():
    bench = Bench(budget=7)
    bench.add("warm", A, max_tokens=1)
    bench.run()
    bench.plans.clear()
    bench.add("scored", A, max_tokens=1, prompt_logprobs=0)
    bench.add("scored-first", B, max_tokens=1, prompt_logprobs=0)
    bench.run()
    assert sum(plan.get("scored", 0) for plan in bench.plans) == 12
    assert bench.told["scored"].cached == {0}
    bench.add("after", B, max_tokens=1)
    bench.run()
    assert bench.told["after"].cached == {8}
    bench.prove()


@pytest.mark.parametrize("budget", [*range(1, 10), 64])
@pytest.mark.parametrize("length", [1, 2, 8])
def test_prompt_logprobs_come_once_and_whole_whatever_the_chunks(budget, length):
    bench = Bench(budget=budget)
    bench.add("scored", A[:length], max_tokens=2, prompt_logprobs=0)
    bench.run()
    (rows,) = bench.told["scored"].prompt_logprobs
    assert rows == [None, *((token, -float(index), []) for index, token in enumerate(A[1:length]))]
    bench.prove()


def test_the_first_step_tells_the_cached_tokens_before_any_token_comes():
    bench = Bench(budget=3)
    bench.add("warm", A, max_tokens=1)
    bench.run()
    bench.add("a", [*A[:8], *B], max_tokens=1)
    bench.step()
    assert (bench.told["a"].cached, bench.told["a"].tokens) == ({8}, [])
    bench.run()
    assert bench.told["a"].cached == {8}


def test_a_big_head_waits_a_bounded_time_and_nobody_overtakes_it():
    """SC-H6. The policy is first come, first served: the head is admitted when those that run have ended."""
    bench = Bench(blocks=8)
    bench.add("long", A[:8], max_tokens=16)
    bench.step()
    bench.add("big", [*B, *C[:4]], max_tokens=8)
    for index in range(5):
        bench.add(f"tiny{index}", C[index : index + 2], max_tokens=1)
    bench.run(most=16 + 8)
    first = next(index for index, plan in enumerate(bench.plans) if "big" in plan)
    assert first <= 16
    assert all(not any(name.startswith("tiny") for name in plan) for plan in bench.plans[:first])
    bench.prove()
