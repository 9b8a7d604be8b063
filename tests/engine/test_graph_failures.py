"""Steps prepared on the device that fail, and numbers that are none: who is told, and that the others go on."""

import pytest
from torch import Tensor

from tests.engine.breaking import failing_forward, nan_embedding
from tests.engine.driving import Reply, request, run, settle
from tests.engine.resident_steps import PROMPT, sampling


def test_results_overwritten_before_they_are_read_are_an_error(make_resident):
    """Two steps may be in flight. A third one takes the first one's place, which must not go unseen."""
    engine = make_resident(overlap=True)
    engine._depth = 3
    replies = run(engine, [request("x", PROMPT, sampling(9))])
    assert isinstance(engine.failure, AssertionError)
    assert "overwritten" in (replies["x"].error or "")


def test_places_that_the_device_was_not_told_are_told_again(make_resident, monkeypatch):
    """x, in row 0, fails before the device knows that it decodes; z takes its row, and y, in row 1, goes on."""
    jobs = {name: request(name, PROMPT[n:], sampling(20)) for n, name in enumerate("xyz")}
    truth = {name: run(make_resident(), [job])[name].tokens for name, job in jobs.items()}
    engine = make_resident(overlap=True, max_sequences=2)

    def broken(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("injected")

    def interfere(step: int) -> None:
        if step in (3, 6):
            engine.hold("x" if step == 3 else "y")
        if step == 8:
            monkeypatch.setattr("engine.resident.send", broken)
            engine.unhold("x")
            engine.add(jobs["z"])
            engine.hold("z")
        if step in (10, 15):
            engine.unhold("z" if step == 10 else "y")

    replies: dict[str, Reply] = {}
    for name in "xy":
        engine.add(jobs[name])
    for step in range(100):
        for delta in engine.step():
            replies.setdefault(delta.id, Reply()).take(delta)
        interfere(step)
    settle(engine)
    assert replies["x"].error == "the step failed: injected"
    assert {name: replies[name].tokens for name in "yz"} == {name: truth[name] for name in "yz"}


def test_who_was_held_goes_on_after_a_failed_forward(make_resident):
    truth = run(make_resident(), [request("x", PROMPT, sampling(20)), request("y", PROMPT[2:], sampling(20))])
    engine = make_resident(overlap=True)

    def interfere(step: int, _: object) -> None:
        if step == 3:
            engine.hold("x")
        if step == 6:
            engine.add(request("more", PROMPT[:5], sampling(3)))
        if step == 9:
            engine.unhold("x")

    requests = [request("x", PROMPT, sampling(20)), request("y", PROMPT[2:], sampling(20))]
    with failing_forward(engine, 8):
        replies = run(engine, requests, between=interfere)
    assert replies["x"].tokens == truth["x"].tokens
    assert {replies[name].error for name in ("y", "more")} == {"the step failed: injected into the forward"}
    assert run(engine, [request("y", PROMPT[2:], sampling(20))])["y"].tokens == truth["y"].tokens


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("budget", [4, 400])
def test_what_is_not_a_number_ends_its_own_request_only(make_resident, checkpoints, kind, budget):
    """An embedding that is NaN, in a prompt or drawn; plain models, and such whose windows soon hide it."""
    model = str(checkpoints(kind, **({"sliding_window": 3, "num_hidden_layers": 1} if kind == "mistral" else {}))[0])
    longer = PROMPT * 16  # over a tile of 256 keys, within which plain torch multiplies what is masked by 0
    requests = [request("bad", [9, 77, *longer], sampling(5)), request("x", PROMPT, sampling(9)),
                request("y", PROMPT[3:], sampling(9, temperature=0.9))]  # fmt: skip
    results = []
    for graphs in (False, True):
        engine = make_resident(model=model, graphs=graphs, overlap=True, max_step_tokens=budget)
        with nan_embedding(engine, 77):
            replies = run(engine, requests)
        results.append((replies, engine.stats().prompt_tokens, engine.stats().steps))
    assert results[0] == results[1]
    assert "not finite" in (results[1][0]["bad"].error or "")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_end_their_own_request_only(make_resident, value):
    truth = run(make_resident(), [request("x", PROMPT, sampling(8))])
    engine = make_resident(overlap=True)
    compute, steps = engine.runner.logits, []

    def broken(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        steps.append(len(logits))
        if len(steps) > 3:
            logits[0, 7] = value
        return logits

    engine.runner.logits = broken
    replies = run(engine, [request("bad", PROMPT, sampling(8)), request("x", PROMPT, sampling(8))])
    assert "not finite" in (replies["bad"].error or "")
    assert replies["bad"].tokens == truth["x"].tokens[: len(replies["bad"].tokens)]
