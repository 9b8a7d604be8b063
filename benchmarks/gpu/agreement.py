"""The engine on the device beside the engine on a CPU: one small random model, the same weights, tokens and logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line
from benchmarks.ours import random_prompts
from benchmarks.random_model import SHAPES, make_engine
from engine import Engine, Request, SamplingParams
from engine.resident import ResidentStepper

SHAPE, NEW = "tiny", 12
LARGEST_ERROR = 1e-3  # of a logit in float32, beside logits of about 1
REPLIES = dict[str, list[int]]


def check(machine: Machine) -> Iterator[Line]:
    yield from machine.attempt("engine: tokens and logits as on a CPU", lambda: compare(machine))
    yield from machine.attempt("engine: graphs", lambda: compare_graphs(machine))
    yield from machine.attempt("engine: launches without waiting", lambda: watch(machine))


def requests(longest: int = 60) -> list[Request]:
    lengths = [1, 5, 16, 17, 40, longest]
    prompts = [random_prompts(1, length, SHAPES[SHAPE]["vocab_size"], seed=length)[0] for length in lengths]
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    return [Request(id=f"{len(prompt)}", tokens=prompt, sampling=sampling) for prompt in prompts]


def engine_on(device: str, **settings: Any) -> Engine:
    return make_engine(
        SHAPE, on_device=False, device=device, dtype="float32", kv_blocks=64, max_sequences=8, max_step_tokens=32,
        threads=1, **settings,
    )  # fmt: skip


def run(engine: Engine) -> tuple[REPLIES, dict[tuple[str, int], Tensor]]:
    """Replies, and the logits that each of their tokens was chosen from."""
    logits, replies = dict[tuple[str, int], Tensor](), REPLIES()
    sampler: Any = engine.runner._sampler  # pyright: ignore[reportPrivateUsage]
    draw = sampler.draw

    def recording(rows: Tensor, sequences: list[Any], positions: Tensor) -> object:
        for row, sequence, position in zip(rows.cpu(), sequences, positions.tolist(), strict=True):
            logits[sequence.id, position] = row
        return draw(rows, sequences, positions)

    sampler.draw = recording
    for request in requests():
        engine.add(request)
    while engine.busy:
        for delta in engine.step():
            assert delta.error is None, delta.error
            replies.setdefault(delta.id, []).extend(delta.tokens)
    return replies, logits


def compare(machine: Machine) -> list[Line]:
    """Over the tokens that both sides have: after two logits that are nearly equal they may part."""
    expected, right = run(engine_on("cpu", kernels="torch"))
    found, there = run(engine_on(machine.device.type, graphs=False))
    same = sum(one == other for name in expected for one, other in zip(expected[name], found[name], strict=True))
    total = sum(map(len, expected.values()))
    agreeing = {name: _agreeing(expected[name], found[name]) for name in expected}
    lengths = {name: int(name) for name in expected}
    errors = [
        float((there[key] - logits).abs().max())
        for key, logits in right.items()
        if key in there and key[1] <= lengths[key[0]] + agreeing[key[0]]
    ]
    said = f"{same} of {total} greedy tokens are the same"
    return [
        Line(name="engine: tokens as on a CPU", ok=same == total, said=said),
        Line(name="engine: logits as on a CPU", value=max(errors), unit="error", ok=max(errors) <= LARGEST_ERROR,
             said=f"the largest of {len(errors)} rows; {LARGEST_ERROR:g} allowed"),
    ]  # fmt: skip


def mixed_requests() -> list[Request]:
    """Greedy, drawn and filtered, and with log-probabilities, which come from the logits of a graph."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 3}, {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 2, "seed": 5},
    ]  # fmt: skip
    vocab = SHAPES[SHAPE]["vocab_size"]
    prompts = [random_prompts(1, 5 + 9 * number, vocab, seed=number)[0] for number in range(len(kinds))]
    sampled = [SamplingParams(max_tokens=NEW - number, ignore_eos=True, **kind) for number, kind in enumerate(kinds)]
    return [Request(id=f"{n}", tokens=prompt, sampling=sampled[n]) for n, prompt in enumerate(prompts)]


def compare_graphs(machine: Machine) -> list[Line]:
    """Twice the same requests: the first time forms are computed and captured, then replayed; and without graphs."""
    settings: dict[str, Any] = {"graphs": True} | ({"kernels": "torch"} if machine.dry else {})
    engine = engine_on(machine.device.type, **settings)
    first, again = _serve(engine), _serve(engine)
    without = _serve(engine_on(machine.device.type, **settings | {"graphs": False}))
    error = max(abs(one - other) for one, other in zip(first[1], again[1], strict=True))
    same = sum(one == other for name in first[0] for one, other in zip(first[0][name], without[0][name], strict=True))
    total = sum(map(len, first[0].values()))
    graphs = cast("ResidentStepper", engine.runner.stepper).graphs
    captured = machine.dry or (graphs.captured > 0 and not graphs.refused)
    refused = "".join(f"; none of {form}: {why}" for form, why in graphs.refused.items())
    return [
        Line(name="engine: captured graphs", value=graphs.captured, unit="graphs", ok=captured, said=refused[2:302]),
        Line(name="engine: replayed graphs", value=error, unit="error", ok=first == again,
             said="of log-probabilities, beside those of the steps that were captured; tokens and these must be equal"),
        Line(name="engine: tokens by graphs", ok=same == total, said=f"{same} of {total} are those without graphs"),
    ]  # fmt: skip


def _serve(engine: Engine) -> tuple[REPLIES, list[float]]:
    """Replies, and the log-probabilities of their tokens, in order of the requests."""
    replies, logprobs = REPLIES(), dict[str, list[float]]()
    for request in mixed_requests():
        engine.add(request)
    while engine.busy:
        for delta in engine.step():
            assert delta.error is None, delta.error
            replies.setdefault(delta.id, []).extend(delta.tokens)
            logprobs.setdefault(delta.id, []).extend(own for _, own, _ in delta.logprobs or ())
    return replies, [own for name in sorted(logprobs) for own in logprobs[name]]


def _agreeing(one: list[int], other: list[int]) -> int:
    """How many tokens are the same at the start."""
    pairs = zip(one, other, strict=True)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), len(one))


@contextmanager
def refusing_to_wait(machine: Machine) -> Iterator[None]:
    """Within, whatever makes the host wait for the device raises."""
    if not machine.dry:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if not machine.dry:
            torch.cuda.set_sync_debug_mode("default")


def watch(machine: Machine) -> list[Line]:
    """Every launch of a run, greedy and sampled; the first round compiles and measures, and may wait."""
    engine = engine_on(machine.device.type, prefix_cache=True)
    launch, launches = engine.runner.launch, list[int]()

    def watched(plan: Any) -> Any:
        launches.append(len(plan.entries))
        with refusing_to_wait(machine):
            return launch(plan)

    for round_number in range(2):
        if round_number:
            engine.runner.launch = watched
        for request in requests():
            engine.add(request)
        sampled = SamplingParams(max_tokens=NEW, temperature=0.8, top_p=0.9, top_k=20, ignore_eos=True)
        engine.add(Request(id="sampled", tokens=[3, 4, 5 + round_number], sampling=sampled))
        while engine.busy:
            engine.step()
    failure = "" if engine.failure is None else f": {engine.failure}"
    said = f"{len(launches)} launches{failure}"
    return [Line(name="engine: launches without waiting", ok=engine.failure is None, said=said[:300])]
