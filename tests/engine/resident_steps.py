"""Driving engines whose steps are prepared on the device: their logits, random schedules, captures without CUDA."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Engine, Request, SamplingParams
from engine.plan import Plan
from engine.work import StepWork
from tests.engine.driving import Reply, request, settle

Logits = dict[tuple[str, int], Tensor]

PROMPT = list(range(10, 27))


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1e-6, "top_k": 3},
    {"temperature": 0.7, "min_p": 0.1, "seed": 2**64 - 1},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1, "top_k": 40},
    {"temperature": 0.0, "logit_bias": {5: 3.0, 60: -9.0}},
    {"temperature": 0.9, "min_tokens": 4, "stop_token_ids": list(range(3, 90))},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.9, "prompt_logprobs": 0, "logprobs": 1},
)


def record(engine: Engine) -> Logits:
    """As `record_logits`, where works choose tokens themselves: row i of a step's logits is its i-th entry's."""
    recorded: Logits = {}
    launch, compute, plans = engine.runner.launch, engine.runner.logits, list[Plan]()

    def launching(plan: Plan) -> Any:
        plans.append(plan)
        return launch(plan)

    def computing(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        for entry, row in zip(plans.pop().entries if plans else (), logits.clone(), strict=False):
            if entry.samples:
                recorded[entry.sequence.id, entry.start + entry.count] = row
        return logits

    engine.runner.launch, engine.runner.logits = launching, computing
    return recorded


class Schedule:
    """Random requests that come, are cancelled, held and let go at random steps: the same ones for each engine."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.settings: dict[str, Any] = {
            "max_step_tokens": source.choice([5, 16, 40]), "max_sequences": source.choice([2, 5, 19]),
            "kv_blocks": source.choice([22, 24, 120]), "overlap": source.random() < 0.7,
            "prefix_cache": source.random() < 0.5,
        }  # fmt: skip
        shared = [source.randrange(3, 160) for _ in range(20)]
        self.requests: list[tuple[int, Request]] = []
        self.calls: list[tuple[int, str, str]] = []
        for number in range(source.randint(8, 14)):
            begin = shared[: source.choice([0, 0, 9, 20])]
            prompt = begin + [source.randrange(3, 160) for _ in range(source.choice([1, 2, 4, 17, 33]))]
            ends = [source.randrange(160) for _ in range(3)]
            kind = {"max_tokens": source.choice([0, 1, 5, 14, 30]), "stop_token_ids": ends} | source.choice(KINDS)
            kind["min_tokens"] = min(kind.get("min_tokens", 0), kind["max_tokens"])
            self.requests.append((source.randrange(25), request(f"r{number}", prompt, SamplingParams(**kind))))
            if source.random() < 0.4:
                begin = source.randrange(30)
                if source.random() < 0.5:
                    self.calls.append((begin, "cancel", f"r{number}"))
                else:
                    end = begin + source.randrange(1, 9)
                    self.calls += [(begin, "hold", f"r{number}"), (end, "unhold", f"r{number}")]

    def run(self, engine: Engine) -> dict[str, Reply]:
        replies: dict[str, Reply] = {}
        coming, calls, step = sorted(self.requests, key=lambda pair: pair[0]), sorted(self.calls), 0
        while coming or calls or engine.busy:
            while coming and coming[0][0] <= step:
                engine.add(coming.pop(0)[1])
            while calls and calls[0][0] <= step:
                _, call, name = calls.pop(0)
                getattr(engine, call)(name)
            for delta in engine.step():
                replies.setdefault(delta.id, Reply()).take(delta)
            engine.check()
            step += 1
            assert step < 2000
        assert engine.failure is None
        settle(engine)
        return replies


def assert_same(left: tuple[dict[str, Reply], Logits], right: tuple[dict[str, Reply], Logits]) -> None:
    assert left[0] == right[0]
    assert left[1].keys() == right[1].keys()
    for key, row in left[1].items():
        assert torch.equal(row, right[1][key]), key


def sampling(count: int = 6, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True} | more)


def mixed_batch() -> list[Request]:
    """One request of each kind, of lengths around a block's end; those that the lottery serves are the last to end."""
    late = ({"logprobs"}, {"logit_bias"}, {"prompt_logprobs"}, {"min_tokens"}, {"repetition_penalty"})
    ends = [5 + n % 3 + 4 * (not any(names & kind.keys() for names in late)) for n, kind in enumerate(KINDS)]
    kinds = [{"max_tokens": end, "ignore_eos": True} | kind for end, kind in zip(ends, KINDS, strict=True)]
    return [request(f"k{n}", PROMPT[: 3 + n % 12], SamplingParams(**kind)) for n, kind in enumerate(kinds)]


class Captures:
    """In place of CUDA: what was captured can be replayed, and calls the work again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.log: list[str] = []
        self.replays = 0
        graphs = engine.runner.stepper.graphs
        graphs._captures, graphs._on_compile = True, self.log.append
        monkeypatch.setattr("engine.graphs.capture", self.capture)

    def capture(self, work: StepWork, pool: object) -> Callable[[], None]:
        assert self.log[-1] == f"CUDA graph of {work.form}", "who waits for it must have been told"

        def replay() -> None:
            self.replays += 1
            work()

        return replay
