"""What a step costs beside the model: plan, batch, sampling and commit, with the model replaced by nothing.

    python -m benchmarks.step                # batches of 1 and 16 decodes, and the marks
    python -m benchmarks.step --check        # exit 1 unless the marks are met

The engine is real and so are its steps; only the forward pass is skipped: hidden states and logits are zeros that were
made once. The vocabulary is small, so that passes over it (the sampler's part that grows with the model) do not count.
Times are the median of many steps, of this thread's processor time where the system tells: others' work does not count.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import Struct
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from benchmarks.environment import describe
from benchmarks.ours import random_prompts
from engine import Engine, EngineConfig, Request, SamplingParams

VOCABULARY, PROMPT, STEPS = 256, 100, 600
MARKS = {1: 0.3, 16: 1.0}  # milliseconds a step
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=STEPS, ignore_eos=True)


class Cost(Struct, frozen=True):
    """Milliseconds of a step, without and with sampling parameters."""

    greedy: float
    sampled: float


def make_engine(folder: Path, sequences: int) -> Engine:
    """An engine on a tiny random model that computes nothing."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    settings = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", kv_blocks=2048, max_sequences=sequences, threads=1
    )
    engine = Engine(settings)
    hidden, logits = torch.zeros(4096, config.hidden_size), torch.zeros(sequences, VOCABULARY)
    engine.runner.model.forward = lambda inputs, cache: hidden[: len(inputs.ids)]
    engine.runner.model.logits = lambda rows: logits[: len(rows)].clone()
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
    engine = make_engine(folder, batch)
    return Cost(*(median(step_times(engine, batch, sampling)) for sampling in (GREEDY, SAMPLED)))


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
            f"batch {batch:>2}: {cost.greedy:.3f} ms greedy (at most {mark}: {verdict}), {cost.sampled:.3f} ms sampled"
        )
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
