"""An engine stand-in with the surface of `worker.bridge.Bridge`: a reply is a pure function of the prompt."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.request import Delta, FinishReason, Request, Stats, Usage
from engine.wire import EngineInfo, Loading
from tests.worker.text_fixtures import engine_info
from worker.bridge import EngineDied

Refusal = Literal["invalid", "too_large"] | None

FIRST_BYTE = 3  # ids of the byte-level tokenizer: three control tokens, then the 256 bytes
EOS = 0


def token_at(prompt: list[int], position: int) -> int:
    """The letter that follows `prompt` and `position` tokens of its reply."""
    return FIRST_BYTE + ord("a") + (sum(prompt) + 7 * position) % 26


def script(prompt: list[int], count: int) -> list[int]:
    return [token_at(prompt, position) for position in range(count)]


def text_of(ids: list[int]) -> str:
    return "".join(chr(token - FIRST_BYTE) for token in ids)


class FakeEngine:
    """Steps all requests at once, each `step_seconds`. Tests stop it (`go.clear()`), break it, and look at `added`."""

    def __init__(
        self,
        *,
        step_seconds: float = 0.002,
        tokens_per_step: int = 1,
        prompt_logprobs: bool = False,
        logprob: float = -0.5,
        cached_tokens: int = 2,
        **info: object,
    ) -> None:
        self.info: EngineInfo = engine_info(
            **{"numerics": "fake", "max_model_len": 4096, "capacity_tokens": 65536} | info
        )
        self.stats, self.stats_time = Stats(), time.monotonic()
        self.last_step = time.monotonic()
        self.compiling: str | None = None
        self.in_flight: list[str] = []
        self.busy = False
        self.pid = None
        self.loading = [Loading("model", 0.0)]
        self.go = asyncio.Event()
        self.go.set()
        self.added: list[Request] = []
        self.held: set[str] = set()
        self.cancelled: list[str] = []
        self.refuse: dict[str, tuple[Refusal, str]] = {}  # by request id: what the engine says of it
        self.killed = False
        self.unkillable = False  # as a process that waits in a device driver
        self.closed = False
        self.refuse_start: Exception | None = None
        self._step_seconds = step_seconds
        self._per_step = tokens_per_step
        self._prompt_logprobs, self._logprob, self._cached = prompt_logprobs, logprob, cached_tokens
        self._running: dict[str, tuple[Request, int]] = {}
        self._last_words: list[Delta] = []
        self._death: EngineDied | None = None

    async def spawn(self) -> None:
        pass

    async def start(self, config: EngineConfig) -> None:
        self.config = config
        if self.refuse_start:
            raise self.refuse_start

    def add(self, request: Request) -> None:
        assert request.id not in self._running, f"{request.id} is in the engine already"
        assert request.id not in [delta.id for delta in self._last_words], f"{request.id} has not left the engine"
        self.added.append(request)
        self._running[request.id] = (request, len(request.output))
        self.busy = True

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        if self._running.pop(request_id, None):
            self._last_words.append(Delta(id=request_id, finish_reason=FinishReason.CANCELLED))

    def hold(self, request_id: str) -> None:
        self.held.add(request_id)

    def unhold(self, request_id: str) -> None:
        self.held.discard(request_id)

    def kill(self) -> None:
        self.killed = True
        if not self.unkillable:
            self.die("killed", self.in_flight)

    def die(self, message: str, in_flight: list[str] | None = None) -> None:
        self._death = EngineDied(message, in_flight or [])
        self.go.set()

    async def close(self) -> None:
        self.closed = True

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        while True:
            await asyncio.sleep(self._step_seconds)
            await self.go.wait()
            if self._death:
                raise self._death
            self.last_step = time.monotonic()
            deltas, self._last_words = self._last_words, []
            deltas += [self._step(*item) for key, item in list(self._running.items()) if key not in self.held]
            self.busy = bool(self._running)
            if deltas:
                yield deltas

    def _step(self, request: Request, position: int) -> Delta:
        usage = Usage(prompt_tokens=len(request.tokens), cached_tokens=self._cached)
        if request.id in self.refuse:
            del self._running[request.id]
            refusal, error = self.refuse[request.id]
            return Delta(id=request.id, finish_reason=FinishReason.ERROR, error=error, refusal=refusal)
        limit = request.sampling.max_tokens
        last = position + self._per_step if limit is None else min(position + self._per_step, limit)
        tokens = [token_at(request.tokens, i) for i in range(position, last)]
        logprobs = [(token, self._logprob, []) for token in tokens] if request.sampling.logprobs is not None else None
        ended = limit is not None and last >= limit
        if ended:
            del self._running[request.id]
        else:
            self._running[request.id] = (request, last)
        reason = FinishReason.LENGTH if ended else None
        delta = Delta(id=request.id, tokens=tokens, logprobs=logprobs, finish_reason=reason, usage=usage)
        if self._prompt_logprobs and position == 0:
            scored = [None, *((token, -1.0, []) for token in request.tokens[1:])]
            delta = msgspec.structs.replace(delta, prompt_logprobs=scored)
        return delta
