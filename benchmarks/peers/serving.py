"""One engine behind a pipe, in its own virtual environment: only the standard library may be imported here.

The parent writes a JSON line for each run, `{"prompts": [[ids]], "tokens": n}`, and reads one back:
`{"first": [seconds], "total": seconds, "produced": [n]}`, with times since the run began. The first line of all is the
engine's own: `{"version": "...", "ready_at": unix seconds}`. The end of standard input is the end of the process.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

Prompt = list[int]


class Outcome:
    """What came of one run: seconds until each job's first token and until the end of all, and each one's tokens."""

    def __init__(self, jobs: int) -> None:
        self._began = time.perf_counter()
        self.first: list[float | None] = [None] * jobs
        self.produced = [0] * jobs
        self.total = 0.0

    def add(self, job: int, tokens: int) -> None:
        """`tokens` more of a job are there now."""
        self.produced[job] += tokens
        if self.first[job] is None and tokens:
            self.first[job] = time.perf_counter() - self._began

    def end(self) -> "Outcome":
        self.total = time.perf_counter() - self._began
        return self


class Engine(Protocol):
    """`run` generates exactly `tokens` tokens for each prompt, greedily, past any end; all prompts come at once."""

    version: str

    def run(self, prompts: list[Prompt], tokens: int) -> Outcome: ...


def serve(make: Callable[[dict[str, Any]], Engine]) -> None:
    """Make the engine from the options in argv[1] (JSON), then serve. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    engine = make(options)
    engine.run([[5] * 8], 1)  # the first token is part of the start
    _say(answers, {"version": engine.version, "ready_at": time.time()})
    for line in sys.stdin:
        asked = json.loads(line)
        outcome = engine.run(asked["prompts"], asked["tokens"])
        _say(answers, {"first": outcome.first, "total": outcome.total, "produced": outcome.produced})


def _say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
