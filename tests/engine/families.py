"""Comparing an engine with transformers at every position of a reply."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine import Engine, SamplingParams
from tests.engine.driving import poison, request, run


def record_positions(engine: Engine) -> dict[int, Tensor]:
    """From now on, the logits at every position that is computed, prompts included. For one request at a time."""
    recorded: dict[int, Tensor] = {}
    model, forward = engine.runner.model, engine.runner.model.forward

    def recording(inputs, cache):
        hidden = forward(inputs, cache)
        recorded.update(zip(inputs.positions.tolist(), model.logits(hidden), strict=True))
        return hidden

    model.forward = recording
    return recorded


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_every_position_equals(
    engine: Engine,
    oracle: PreTrainedModel,
    *,
    prompt_length: int,
    output_length: int = 12,
    tolerance: float = 1e-4,
    greedy: bool = True,
) -> None:
    """Logits of prompt and greedy reply are the oracle's, relative to the largest, and its tokens are its best."""
    poison(engine)
    recorded = record_positions(engine)
    sampling = SamplingParams(max_tokens=output_length, temperature=0.0, ignore_eos=True)
    prompt = random_tokens(prompt_length)
    tokens = prompt + run(engine, [request("x", prompt, sampling)])["x"].tokens
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0].float()
    assert sorted(recorded) == list(range(len(tokens) - 1))
    ours = torch.stack([recorded[position] for position in range(len(tokens) - 1)])
    worst = (ours - expected[:-1]).abs().amax(-1) / expected[:-1].abs().amax(-1)
    assert worst.max() < tolerance, f"position {int(worst.argmax())} is off by {worst.max():.1e}"
    if greedy:
        assert tokens[prompt_length:] == expected[prompt_length - 1 : -1].argmax(-1).tolist()
