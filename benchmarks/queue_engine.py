"""An engine's stand-in: `python -m benchmarks.queue_engine FD` speaks as `engine.child` does, and computes nothing.

Each running request gets a token a step, `rate` steps a second; a request that comes while nothing runs is stepped at
once. The environment variable PLAN says how fast and how many, and where to note the moment that a token leaves.
"""

import os
import socket
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.queue_stamps import Stamps
from engine.child import IDLE_SECONDS, Channel, ParentGoneError, die_with_parent
from engine.request import Delta, FinishReason, Request, Stats, Usage
from engine.wire import Add, Begin, Cancel, Command, EngineInfo, Hold, Launching, Ready, Stepped, Stop, Unhold

PLAN = "GLLM_BENCHMARK_PLAN"
FIRST_ID, IDS = 1000, 4000  # of the tokens that replies consist of: plain ones of the demo model, not all of them


class Plan(Struct, frozen=True):
    """`rate`: tokens a second of each request; `rows`: requests at a time; `jobs` and `tokens`: shape of the stamps;
    `limit`: tokens of a prompt and its reply.
    """

    rate: float
    rows: int
    stamps: str
    jobs: int
    tokens: int
    limit: int = 8192

    def open_stamps(self) -> Stamps:
        return Stamps(Path(self.stamps), self.jobs, self.tokens)

    @staticmethod
    def of_environment() -> "Plan":
        return msgspec.json.decode(os.environ[PLAN], type=Plan)


def job_id(run: str, index: int) -> str:
    """32 characters, as those that clients make; the last ones tell which job it is."""
    return f"{run[:24]:0<24}{index:08d}"


def index_of(request_id: str) -> int:
    return int(request_id[-8:])


class Row:
    """A running request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.index = index_of(request.id)
        self.position = len(request.output)
        self.held = False

    @property
    def ended(self) -> bool:
        return self.position >= (self.request.sampling.max_tokens or 1)

    def step(self) -> Delta:
        token = FIRST_ID + (7919 * self.index + 104_729 * self.position) % IDS
        self.position += 1
        return Delta(
            id=self.request.id,
            tokens=[token],
            finish_reason=FinishReason.LENGTH if self.ended else None,
            usage=Usage(prompt_tokens=len(self.request.tokens), completion_tokens=self.position),
        )


class StandIn:
    """Serves one channel until it is told to stop."""

    def __init__(self, channel: Channel, plan: Plan) -> None:
        self._channel = channel
        self._plan = plan
        self._stamps = plan.open_stamps()
        self._rows: dict[str, Row] = {}
        self._cancelled: list[Delta] = []
        self._launching: list[str] = []
        self._due = 0.0
        self._steps = 0
        self._stopping = False

    def serve(self) -> None:
        while not self._stopping:
            self._obey(self._channel.receive(self._pause()))
            if self._busy and time.monotonic() >= self._due:
                self._step()

    @property
    def _busy(self) -> bool:
        return bool(self._rows or self._cancelled)

    def _pause(self) -> float:
        return max(0.0, self._due - time.monotonic()) if self._busy else IDLE_SECONDS

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Begin():
                    self._channel.send(Ready(self._info()))
                case Add(request):
                    self._add(request)
                case Cancel(request_id):
                    if self._rows.pop(request_id, None):
                        self._cancelled.append(Delta(id=request_id, finish_reason=FinishReason.CANCELLED))
                case Hold(request_id) | Unhold(request_id):
                    if row := self._rows.get(request_id):
                        row.held = isinstance(command, Hold)
                case Stop():
                    self._stopping = True

    def _info(self) -> EngineInfo:
        return EngineInfo(
            model="stand-in", numerics="none", device="cpu", dtype="none", deterministic=True, vocab_size=49_152,
            max_model_len=self._plan.limit, block_size=16, kv_blocks=self._plan.limit // 16 * self._plan.rows,
            max_sequences=self._plan.rows, capacity_tokens=self._plan.limit * self._plan.rows, eos_token_ids=[],
        )  # fmt: skip

    def _add(self, request: Request) -> None:
        row = Row(request)
        self._stamps.view[self._stamps.added(row.index)] = time.monotonic()
        if not self._rows:
            self._due = time.monotonic()
        self._rows[request.id] = row

    def _step(self) -> None:
        self._announce()
        self._due = max(self._due + 1 / self._plan.rate, time.monotonic())
        self._steps += 1
        now, stepped = time.monotonic(), [row for row in self._rows.values() if not row.held]
        deltas = self._cancelled + [row.step() for row in stepped]
        self._channel.send(Stepped(deltas, Stats(running=len(self._rows), steps=self._steps)))
        self._cancelled = []
        for row in stepped:
            self._stamps.view[self._stamps.left(row.index, row.position - 1)] = now
            if row.ended:
                del self._rows[row.request.id]

    def _announce(self) -> None:
        ids = list(self._rows)
        if ids != self._launching:
            self._launching = ids
            self._channel.send(Launching(ids))


def main(descriptor: int) -> int:
    die_with_parent()
    try:
        StandIn(Channel(socket.socket(fileno=descriptor)), Plan.of_environment()).serve()
    except ParentGoneError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
