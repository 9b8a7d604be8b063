"""Standing still and standing alone: hold, and trial. No torch: see scripted.py."""

import pytest

from tests.engine.scripted import Bench

A, B, C = ([start + n for n in range(12)] for start in (3, 17, 31))
depths = pytest.mark.parametrize("depth", [1, 2])


def until(bench: Bench, what) -> None:
    for _ in range(200):
        if what():
            return
        bench.step()
    raise AssertionError("never came")


# -- hold -------------------------------------------------------------------------------------------------------------


@depths
@pytest.mark.parametrize("steps", range(6))
def test_held_after_any_number_of_steps_stands_still_and_goes_on(depth, steps):
    bench = Bench(budget=5, depth=depth)
    x = bench.add("x", A, max_tokens=4)
    bench.add("beside", B, max_tokens=9)
    for _ in range(steps):
        bench.step()
    x.held = True
    while bench.launched:
        bench.collect()
    computed, table = x.computed, list(x.table)
    until(bench, lambda: bench.told["beside"].ends)
    assert (x.computed, x.table) == (computed, table), "it keeps its place and its KV"
    assert bench.launch() is None
    x.held = False
    bench.run()
    bench.prove()


def test_held_before_its_admission_waits_without_keeping_others_waiting():
    bench = Bench()
    x = bench.add("x", A)
    x.held = True
    bench.add("behind", B)
    until(bench, lambda: bench.told["behind"].ends)
    assert x.row < 0
    assert bench.launch() is None
    x.held = False
    bench.run()
    bench.prove()


def test_held_and_preempted_is_not_stepped_at_its_return():
    bench = Bench(blocks=6)
    bench.add("a", A[:4], max_tokens=16)
    x = bench.add("x", B, max_tokens=4)
    bench.step()
    x.held = True
    until(bench, lambda: bench.told["a"].ends)
    assert x.preemptions == 1
    assert bench.launch() is None
    x.held = False
    bench.run()
    bench.prove()


# -- trial ------------------------------------------------------------------------------------------------------------


@depths
def test_one_on_trial_is_stepped_alone_until_its_first_token(depth):
    bench = Bench(budget=7, depth=depth)
    bench.add("a", A, max_tokens=6)
    bench.step()
    x = bench.add("x", B, max_tokens=4, isolate=True)
    bench.add("later", C, max_tokens=3)
    alone = 0
    while not x.output_length:
        while len(bench.launched) < depth and bench.launch():
            pass
        flying = [{entry.sequence.id for entry in plan.entries} for plan, _ in bench.launched]
        assert flying == [{"x"}] or not any("x" in names for names in flying), "nothing else is in flight with it"
        alone += flying == [{"x"}]
        bench.collect()
    assert alone >= 2
    bench.run()
    assert any({"a", "x"} <= set(plan) for plan in bench.plans), "acquitted: it joins the others"
    bench.prove()


def test_a_trial_that_is_resumed_lasts_until_a_new_token():
    bench = Bench()
    bench.add("a", A, max_tokens=6)
    bench.add("x", B, max_tokens=6, isolate=True, output=[5, 6])
    bench.run()
    with_x = [plan for plan in bench.plans if "x" in plan]
    assert with_x[0] == {"x": 14}
    assert all("a" in plan for plan in with_x[1:4])
    bench.prove()


def test_two_trials_follow_each_other():
    bench = Bench()
    for name, tokens in (("x", A), ("y", B)):
        bench.add(name, tokens, max_tokens=3, isolate=True)
    bench.add("a", C, max_tokens=3)
    bench.run()
    assert bench.plans[:3] == [{"x": 12}, {"y": 12}, {"x": 1, "y": 1, "a": 12}]
    bench.prove()


def test_a_held_trial_lets_the_others_go_on():
    bench = Bench(budget=6)
    x = bench.add("x", A, max_tokens=3, isolate=True)
    bench.add("a", B, max_tokens=3)
    bench.step()
    x.held = True
    until(bench, lambda: bench.told["a"].ends)
    x.held = False
    bench.run()
    bench.prove()


def test_a_trial_that_does_not_fit_yet_does_not_stop_those_that_run():
    bench = Bench(blocks=4)
    bench.add("a", A[:8], max_tokens=6)
    bench.step()
    bench.add("x", B, max_tokens=2, isolate=True)
    bench.run()
    assert {"x": 12} in bench.plans
    bench.prove()
