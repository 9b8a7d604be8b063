"""Driving an engine in tests: run it dry, gather what came, and record logits bit by bit."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import Delta, Engine, FinishReason, Request, SamplingParams, Usage

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@dataclass
class Reply:
    """All that an engine said of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    refusal: str | None = None
    ends: int = 0

    def take(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        self.usage = delta.usage
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt_logprobs came twice"
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.error, self.refusal = delta.finish_reason, delta.error, delta.refusal
            self.ends += 1


def request(name: str, tokens: Iterable[int], sampling: SamplingParams = GREEDY, **more: object) -> Request:
    return Request(id=name, tokens=list(tokens), sampling=sampling, **more)


def run(
    engine: Engine,
    requests: Iterable[Request] = (),
    *,
    between: Callable[[int, dict[str, Reply]], None] | None = None,
    most_steps: int = 2000,
) -> dict[str, Reply]:
    """Add requests, step until nothing is left, check the books each time. `between(step, replies)` may interfere."""
    replies: dict[str, Reply] = {}
    for item in requests:
        engine.add(item)
    for step in range(most_steps):
        if not engine.busy:
            break
        for delta in engine.step():
            replies.setdefault(delta.id, Reply()).take(delta)
        engine.check()
        if between is not None:
            between(step, replies)
    assert not engine.busy, f"still busy after {most_steps} steps"
    assert all(reply.ends == 1 for reply in replies.values()), "a request must end exactly once"
    settle(engine)
    return replies


def settle(engine: Engine) -> None:
    """The invariant after every test: nothing runs, so every block is free or reclaimable."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_live) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_reclaimable == engine.pool.size
    engine.check()


def record_logits(engine: Engine) -> dict[tuple[str, int], Tensor]:
    """From now on, every row of logits by (request id, position of the token it predicts), as the model computed it."""
    recorded: dict[tuple[str, int], Tensor] = {}
    draw = engine.runner._sampler.draw

    def recording(logits: Tensor, sequences: list, positions: Tensor) -> object:
        for row, sequence, position in zip(logits.clone(), sequences, positions.tolist(), strict=True):
            recorded[sequence.id, position] = row
        return draw(logits, sequences, positions)

    engine.runner._sampler.draw = recording
    return recorded


def same_bits(left: dict, right: dict, name: str, other: str | None = None) -> int:
    """Assert that a request's logits are the same bits in two recordings; returns the number of positions compared."""
    positions = sorted(position for request_id, position in left if request_id == name)
    assert positions
    for position in positions:
        assert torch.equal(left[name, position], right[other or name, position]), f"{name} differs at {position}"
    return len(positions)


def poison(engine: Engine, value: float = float("nan")) -> None:
    """Fill the whole KV memory, padding block included, so that whatever is read without being written shows."""
    with torch.inference_mode():
        for layer in engine.runner.cache:
            layer.fill_(value)
