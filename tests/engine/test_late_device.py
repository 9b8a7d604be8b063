"""Buffers of steps in flight on a device that is as late as it may be: none is used again too early, nor read."""

import contextlib
from typing import Any

import pytest

from engine.handle import Handle
from tests.engine.driving import Reply, request, run, settle
from tests.engine.late_device import LateDevice
from tests.engine.resident_steps import PROMPT, Schedule, mixed_batch, sampling


@pytest.mark.parametrize("seed", range(20, 25))
def test_a_late_device_gets_the_same_steps(make_resident, monkeypatch, seed):
    schedule = Schedule(seed)
    settings = schedule.settings | {"overlap": True}
    truth = schedule.run(make_resident(graphs=False, **settings))
    engine = make_resident(**settings)
    device = LateDevice(monkeypatch, engine)
    assert schedule.run(engine) == truth
    assert device.late > 10
    assert not device.overwritten


def test_a_buffer_that_is_used_again_too_early_shows_on_a_late_device(make_resident, monkeypatch):
    engine = make_resident(overlap=True)
    device = LateDevice(monkeypatch, engine)
    first, second = engine.runner.stepper._lanes
    second.sent = first.sent
    with contextlib.suppress(AssertionError, IndexError):  # numbers that are none of theirs
        run(engine, mixed_batch())
    assert device.overwritten


def test_a_step_that_failed_half_way_keeps_its_buffer_until_the_device_is_through_with_it(make_resident, monkeypatch):
    """x is held while y's step fails behind its work; then two steps are launched before the device has begun."""
    truth = run(make_resident(), [request("x", PROMPT, sampling(20, temperature=0.9))])["x"].tokens
    engine = make_resident(overlap=True, max_sequences=3)
    stepper = engine.runner.stepper
    hand_over = stepper._hand_over

    def broken(*arguments: Any) -> Handle:
        stepper._hand_over = hand_over
        raise RuntimeError("injected behind the work")

    device = LateDevice(monkeypatch, engine)
    replies: dict[str, Reply] = {}
    for job in (request("x", PROMPT, sampling(20, temperature=0.9)), request("y", PROMPT[2:], sampling(40))):
        engine.add(job)
    for step in range(60):
        if step == 5:
            engine.hold("x")
        if step == 8:
            monkeypatch.setattr(stepper._differences, "place", telling(stepper._differences.place))
            stepper._hand_over = broken
        for delta in engine.step():
            replies.setdefault(delta.id, Reply()).take(delta)
        if step == 8:
            engine.unhold("x")
            engine.add(request("z", PROMPT[4:], sampling(9)))
    settle(engine)
    assert replies["y"].error == "the step failed: injected behind the work"
    assert replies["x"].tokens == truth
    assert not device.overwritten


def telling(place: Any) -> Any:
    """Places are told in every step, so that each one sends its buffer."""

    def told(rows: list[int], bucket: int) -> None:
        place.__self__._places = [-1] * len(place.__self__._places)
        place(rows, bucket)

    return told
