"""What one client does about one job, step by step. Who performs the steps, asyncio or threads, is no matter of it."""

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import gllm
from gllm.reply import Reply
from tests.chaos.witness import Witness
from tests.chaos.workload import Case

Step = Literal["submit", "submit twin", "cancel", "read", "hang up", "look back"]


class Session:
    """Submits, reads with interruptions, cancels or submits again on the way, and sometimes reads it all once more."""

    def __init__(self, case: Case, witness: Witness) -> None:
        self.case = case
        self.witness = witness
        self._rng = random.Random(case.id)
        self._left = 0  # events to read before the next interruption
        again = [] if case.again in (None, -1) else [(case.again, "submit")]
        cancel = [] if case.cancel is None else [(case.cancel, "cancel")]
        self._due: list[tuple[int, Step]] = sorted(again + cancel)  # at how many tokens what is to be done

    def steps(self) -> Iterator[Step]:
        """To be performed one after the other; `witness` decides what comes next."""
        yield "submit"
        if self.case.twin:
            yield "submit twin"
        while not self.witness.ended:
            while self._is_due():
                yield self._due.pop(0)[1]
            self._left = self._rng.randint(*self.case.events)
            yield "read"
            self.witness.hangups += 1
            if self._rng.random() < 0.5:
                yield "hang up"
        if self.case.again == -1:
            yield "submit"
        if self._rng.random() < 0.3:
            yield "look back"

    def take(self, reply: Reply) -> bool:
        """Whether the client is to stop reading here."""
        self.witness.take(reply)
        self._left -= 1
        return self._left <= 0 or self._is_due()

    def compare(self, result: gllm.Result) -> None:
        """A second reader, who reads the whole reply at once, must get the same."""
        if (result.ids, result.text) != (self.witness.ids, self.witness.text):
            self.witness.faults.append(f"a second reader got other tokens or text: {result.ids} {result.text!r}")

    def submission(self, step: Step) -> dict[str, Any]:
        """The arguments of `Client.submit`."""
        case = self.case
        labels = case.labels | ({"priority": case.twin} if step == "submit twin" else {})
        times = {name: timedelta(seconds=value) for name, value in case.times.items()}
        return {"id": case.id, **case.job, **labels, **times}

    def _is_due(self) -> bool:
        return bool(self._due) and len(self.witness.ids) >= self._due[0][0]
