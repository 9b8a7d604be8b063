"""Breaking an engine on purpose: forwards that raise, logits and embeddings that are not numbers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from engine import Engine, SamplingParams
from engine.plan import Plan


@contextmanager
def failing_forward(engine: Engine, step: int) -> Iterator[None]:
    """The forward of the `step`-th step from now on (0 is the next) raises after it has written its KV."""
    forward, count = engine.runner.model.forward, 0

    def broken(*arguments):
        nonlocal count
        hidden = forward(*arguments)
        count += 1
        if count == step + 1:
            raise RuntimeError("injected into the forward")
        return hidden

    engine.runner.model.forward = broken
    yield
    engine.runner.model.forward = forward


@contextmanager
def nan_logits(engine: Engine, names: Iterable[str], value: float = float("nan")) -> Iterator[None]:
    """One logit of these requests' rows is not a number."""
    draw, doomed = engine.runner._sampler.draw, set(names)

    def broken(logits, sequences, positions):
        for row, sequence in zip(logits, sequences, strict=True):
            if sequence.id in doomed:
                row[7] = value
        return draw(logits, sequences, positions)

    engine.runner._sampler.draw = broken
    yield
    engine.runner._sampler.draw = draw


@contextmanager
def nan_embedding(engine: Engine, token: int) -> Iterator[None]:
    """A token's embedding is NaN, and so is all KV from its position on."""
    model, embed = engine.runner.model, engine.runner.model._embed
    model._embed = lambda ids: embed(ids).masked_fill((ids == token)[:, None], float("nan"))
    yield
    model._embed = embed


def record_plans(engine: Engine) -> list[dict[str, int]]:
    """From now on, the tokens of each step by request."""
    plans: list[dict[str, int]] = []
    launch = engine.runner.launch

    def recording(plan: Plan):
        plans.append({entry.sequence.id: entry.count for entry in plan.entries})
        return launch(plan)

    engine.runner.launch = recording
    return plans


def greedy(count: int | None, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, **{"ignore_eos": True} | more)
