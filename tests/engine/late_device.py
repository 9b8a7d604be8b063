"""A device that does nothing before somebody waits for it: the latest that a GPU may be."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Engine
from engine.work import StepWork

EAGER = ("_draw", "_score", "_apply")  # plain torch on a CPU does its work at once: what came before it comes first


class LateDevice:
    """Copies and works of an engine's steps, in their order.

    `late` counts waits that left later ones undone, `overwritten` copies whose numbers the host changed on their way.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.queue, self.asked, self.done = deque[Callable[[], object]](), 0, 0
        self.late = self.overwritten = 0
        stepper, work = engine.runner.stepper, StepWork.__call__
        self._sent = stepper._kept.sent.data_ptr()
        monkeypatch.setattr("engine.resident.send", self.send)
        monkeypatch.setattr(StepWork, "__call__", lambda step: self.ask(lambda: work(step), at_once=step._keeps))
        for name in EAGER:
            setattr(stepper, name, self.after_all(getattr(stepper, name)))
        for lane in stepper._lanes:
            lane.arrival = LateArrival(self)

    def send(self, source: Tensor, target: Tensor) -> None:
        asked = source.clone()

        def copy() -> None:
            if target.data_ptr() == self._sent:
                self.overwritten += not torch.equal(source, asked)
            target.copy_(source)

        self.ask(copy)

    def ask(self, work: Callable[[], object], *, at_once: bool = False) -> None:
        self.queue.append(work)
        self.asked += 1
        if at_once:
            self.catch_up(self.asked)

    def catch_up(self, count: int) -> None:
        self.late += self.asked > count
        while self.done < count:
            self.done += 1
            with torch.inference_mode():
                self.queue.popleft()()

    def after_all(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def caught_up(*arguments: Any) -> Any:
            self.catch_up(self.asked)
            return call(*arguments)

        return caught_up


class LateArrival:
    """See kernels.Arrival."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._count = device, 0

    def start(self) -> None:
        self._count = self._device.asked

    def wait(self) -> None:
        self._device.catch_up(self._count)
