"""What a step costs beside the model: plan, batch, sampling and commit, with the model replaced by nothing.

    python -m benchmarks.step                # batches of 1 to 128 decodes, and the marks
    python -m benchmarks.step --check        # exit 1 unless the marks are met

The engine is real and so are its steps; only the forward pass is skipped: hidden states and logits are zeros that were
made once. What the decoder's own Python costs where a backend does not take all layers in one call, and no graph is
captured, is measured too: 28 layers of kernels that do nothing. The vocabulary is small, so that passes over it (the
sampler's part that grows with the model) do not count. Times are the median of many steps, of this thread's processor
time where the system tells: others' work does not count.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from msgspec import Struct
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from benchmarks.environment import describe
from benchmarks.ours import random_prompts
from engine import Engine, EngineConfig, Request, SamplingParams
from kernels import Linear, TorchBackend

VOCABULARY, PROMPT, STEPS, LAYERS = 256, 100, 300, 28
MARKS = {1: 0.3, 8: 0.5, 16: 1.0, 128: 2.0}  # milliseconds a step; those of 8 and 128 are beside a GPU
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=STEPS, ignore_eos=True)


class Cost(Struct, frozen=True):
    """Milliseconds of a step, without and with sampling parameters; and greedy, through the decoder's own layers."""

    greedy: float
    sampled: float
    layered: float


class Idle(TorchBackend):
    """Kernels that do nothing: each hands on what it was given, or what was made once."""

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        out = torch.zeros(16384, len(weight))
        return lambda x: out[: len(x)]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gate_up

    def store_kv(self, kv: Tensor, new: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        pass

    def attention(self, q: Tensor, *_: object, **__: object) -> Tensor:
        return q


def make_engine(folder: Path, sequences: int, layers: int = 1) -> Engine:
    """An engine on a tiny random model whose kernels do nothing."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    settings = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", kv_blocks=sequences * (PROMPT + STEPS) // 16 + sequences,
        max_sequences=sequences, max_step_tokens=sequences * PROMPT, threads=1,
    )  # fmt: skip
    with patch("engine.runner.select", lambda **_: Idle(deterministic=False)):
        return Engine(settings)


def without_decoder(engine: Engine) -> Engine:
    """The same engine without its decoder."""
    states, logits = torch.zeros(16384, 32), torch.zeros(engine.config.max_sequences, VOCABULARY)
    engine.runner.model.forward = lambda inputs, cache: states[: len(inputs.ids)]
    engine.runner.model.logits = lambda hidden: logits[: len(hidden)].clone()
    return engine


def step_times(engine: Engine, batch: int, sampling: SamplingParams) -> list[float]:
    """Milliseconds of each decode step of `batch` requests."""
    for index, prompt in enumerate(random_prompts(batch, PROMPT, VOCABULARY, seed=batch)):
        engine.add(Request(id=f"{index}", tokens=prompt, sampling=sampling))
    engine.step()  # the prompts
    times = list[float]()
    while engine.busy:
        began = time.thread_time_ns()
        engine.step()
        times.append((time.thread_time_ns() - began) / 1e6)
    return times


def measure(folder: Path, batch: int, median: Callable[[list[float]], float] = statistics.median) -> Cost:
    layered = median(step_times(make_engine(folder, batch, LAYERS), batch, GREEDY))
    engine = without_decoder(make_engine(folder, batch))
    greedy, sampled = (median(step_times(engine, batch, sampling)) for sampling in (GREEDY, SAMPLED))
    return Cost(greedy, sampled, layered)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description="What a step costs beside the model."
    )
    parser.add_argument("--check", action="store_true", help="exit 1 unless the marks are met")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("\n".join(f"{name:>14}  {value}" for name, value in describe(1).items()))
    met = True
    for batch, mark in MARKS.items():
        with tempfile.TemporaryDirectory() as folder:
            cost = measure(Path(folder), batch)
        met &= cost.greedy <= mark
        verdict = "met" if cost.greedy <= mark else "NOT MET"
        print(
            f"batch {batch:>3}: {cost.greedy:.3f} ms greedy (at most {mark}: {verdict}), {cost.sampled:.3f} ms sampled,"
            f" {cost.layered:.3f} ms greedy through {LAYERS} layers of idle kernels"
        )
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
