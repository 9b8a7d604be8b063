"""How a request ends: cancel in every phase, failure, NaN, end tokens. No torch: see scripted.py."""

import pytest

from engine.request import FinishReason
from tests.engine.scripted import EOS, Bench, expected, next_token

A, B, C = ([start + n for n in range(12)] for start in (3, 17, 31))
depths = pytest.mark.parametrize("depth", [1, 2])


# -- cancel -----------------------------------------------------------------------------------------------------------


@depths
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("steps", range(9))
def test_cancelled_after_any_number_of_steps(depth, cache, steps):
    """Waiting, in each chunk of its prompt, decoding, in its last step, and after its end."""
    bench = Bench(budget=5, depth=depth, cache=cache)
    bench.add("x", A, max_tokens=4)
    bench.add("beside", B, max_tokens=9)
    for _ in range(steps):
        bench.step()
    bench.launch()
    known = len(bench.told["x"].tokens)
    bench.cancel("x")
    bench.cancel("x")
    bench.run()
    x = bench.told["x"]
    assert x.tokens == expected(bench.sequences["x"].request, known)
    assert x.reason is (FinishReason.LENGTH if known == 4 else FinishReason.CANCELLED)
    assert x.ends[0].usage.completion_tokens == known
    bench.prove("beside")


def test_cancelled_while_waiting_leaves_no_trace():
    bench = Bench(rows=1)
    bench.add("first", A)
    bench.add("x", B)
    bench.step()
    bench.cancel("x")
    assert not bench.scheduler.waiting
    bench.run()
    assert bench.scheduler.counters.prefix_prompt_tokens == 12
    assert bench.told["x"].tokens == []
    bench.prove("first")


def test_cancelled_in_flight_keeps_blocks_and_row_until_the_step_is_known():
    bench = Bench(blocks=4, rows=1)
    x = bench.add("x", A)
    bench.add("next", B)
    bench.launch()
    table, row = list(x.table), x.row
    bench.cancel("x")
    assert (x.table, x.row) == (table, row), "the launched step may still write there"
    assert bench.scheduler.schedule() is None
    bench.collect()
    assert (x.table, x.row) == ([], -1)
    assert bench.pool.counts.reclaimable == 0, "what was in flight is not published"
    bench.run()
    bench.prove("next")


def test_cancelled_in_the_step_that_would_have_ended_it():
    bench = Bench()
    bench.add("x", A, max_tokens=1)
    bench.launch()
    bench.cancel("x")
    bench.run()
    assert (bench.told["x"].tokens, bench.told["x"].reason) == ([], FinishReason.CANCELLED)
    assert bench.scheduler.counters.generation_tokens == 0


def test_cancelled_while_preempted_and_in_flight():
    bench = Bench(blocks=5, depth=2)
    bench.add("a", A[:7], max_tokens=8)
    x = bench.add("x", B[:7], max_tokens=8)
    for _ in range(40):
        bench.launch()
        if x.row < 0 and x.in_flight:
            break
        bench.collect()
        bench.launch()
    assert x in bench.scheduler.waiting
    bench.cancel("x")
    bench.run()
    assert bench.told["x"].reason is FinishReason.CANCELLED
    bench.prove("a")


# -- failure ----------------------------------------------------------------------------------------------------------


@depths
@pytest.mark.parametrize("steps", range(5))
def test_a_failed_step_ends_its_requests_once_and_publishes_nothing(depth, steps):
    bench = Bench(budget=9, depth=depth)
    bench.add("x", A, max_tokens=3)
    bench.add("y", B, max_tokens=3)
    for _ in range(steps):
        bench.step()
    before = {block for block in range(64) if bench.pool.is_registered(block)}
    live = [name for name in "xy" if bench.sequences[name].row >= 0 and not bench.told[name].ends]
    bench.launch()
    bench.fail()
    assert {block for block in range(64) if bench.pool.is_registered(block)} <= before
    assert all(bench.told[name].reason is FinishReason.ERROR for name in live)
    bench.run()
    bench.add("again", A, max_tokens=3)
    bench.run()
    bench.prove("again")


def test_one_that_was_not_in_the_failed_step_still_learns_of_its_new_blocks():
    """The failed plan carried the swap of an adopted block; its device may never have seen it."""
    bench = Bench(budget=16)
    bench.add("a", A[:8], max_tokens=12)
    twin = bench.add("twin", A[:8], max_tokens=12)
    bench.step()
    assert bench.scheduler._swaps, "twin adopted the blocks of a"
    twin.held = True
    plan = bench.scheduler.schedule()
    bench.take(bench.scheduler.fail(plan, "the device never saw it"))
    twin.held = False
    bench.add("stranger", B, max_tokens=8)  # would be given the blocks that twin gave back
    bench.run()
    assert bench.told["a"].reason is FinishReason.ERROR
    bench.prove("twin", "stranger")


@pytest.mark.parametrize("budget", [12, 64])
def test_nan_ends_one_request_and_its_neighbours_do_not_notice(budget):
    bench = Bench(budget=budget)
    bench.add("x", A, max_tokens=3)
    bench.add("beside", B, max_tokens=6)
    bench.device.broken.add("x")
    bench.run()
    assert bench.told["x"].reason is FinishReason.ERROR
    assert "not finite" in bench.told["x"].ends[0].error
    assert bench.told["x"].tokens == []
    bench.device.broken.clear()
    bench.add("again", A, max_tokens=3)
    bench.run()
    assert bench.told["again"].cached == {0}, "nothing of the broken step was published"
    bench.prove("beside", "again")


def test_nan_in_a_later_step_takes_back_what_only_it_holds():
    """Its published KV may be the cause: left in the index, it would break all who start with the same tokens."""
    bench = Bench(budget=8)
    bench.add("beside", [*A[:5], 50, 51], max_tokens=9)
    bench.step()
    bench.add("x", [*A, *B], max_tokens=9)
    bench.step()
    bench.device.broken.add("x")
    bench.run()
    assert (bench.told["x"].tokens, bench.told["x"].cached) == ([], {4})
    bench.device.broken.clear()
    for name, cached in (("again", 4), ("then", 20)):
        bench.add(name, [*A, *B], max_tokens=1)
        bench.run()
        assert bench.told[name].cached == {cached}, "only what another held is still there"
    bench.prove("beside", "again", "then")


@depths
def test_broken_kv_that_two_share_is_forgotten_with_the_last_of_them(depth):
    bench = Bench(depth=depth, budget=12)
    bench.add("first", A, max_tokens=9)
    bench.step()
    bench.add("second", [*A[:8], 50, 51], max_tokens=9)
    bench.step()
    bench.device.broken |= {"first", "second"}
    bench.run()
    assert bench.told["second"].cached == {8}
    assert bench.pool.counts.reclaimable == 0


def test_nan_of_a_step_that_a_preemption_overtook_takes_back_what_it_had_registered():
    """Then it has no table any more, but what it registered is in the index still."""
    bench = Bench(blocks=6, depth=2)
    bench.add("older", A[:8], max_tokens=14)
    bench.add("x", B[:8], max_tokens=14)
    x = bench.sequences["x"]
    while not (x.row < 0 and x.in_flight):
        bench.step()
        bench.launch_ahead()
    assert len(bench.pool.match(x.tokens, x.namespace, 2)) == 2
    for plan, sampled in bench.launched:
        sampled.broken = [entry.sequence is x for entry in plan.entries]
    while bench.launched:
        bench.collect()
    assert bench.told["x"].reason is FinishReason.ERROR
    assert bench.pool.match(x.tokens, x.namespace, 2) == []
    bench.run()
    bench.prove("older")


# -- ending by token --------------------------------------------------------------------------------------------------


@depths
def test_end_tokens_end_after_min_tokens_and_late_extra_ones_are_dropped(depth):
    bench = Bench(depth=depth, rows=3)
    for start in range(40):
        bench.add(f"r{start}", [start + 3, start + 4], max_tokens=30, ignore_eos=False, min_tokens=start % 5)
    bench.run()
    bench.prove()
    stopped = [told for told in bench.told.values() if told.reason is FinishReason.STOP]
    assert len(stopped) > 5
    assert all(told.tokens[-1] == EOS for told in stopped)
    assert bench.scheduler.counters.generation_tokens == sum(len(told.tokens) for told in bench.told.values())


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 1), (1, 5), (4, 5)])
def test_an_end_token_among_the_first_min_tokens_ends_nothing(min_tokens, count):
    tokens = next([a, b] for a in range(3, 60) for b in range(3, 60) if next_token([a, b]) == EOS)
    bench = Bench()
    bench.add("x", tokens, max_tokens=5, ignore_eos=False, min_tokens=min_tokens)
    bench.run()
    assert len(bench.told["x"].tokens) == count
    bench.prove()
