"""transformers' continuous batching and this engine on the same prompts, one after the other, in one run."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.end_to_end import run, workload
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line, not_built
from benchmarks.ours import Prompt
from benchmarks.random_model import SHAPES, make_engine

ATTENTIONS = ("sdpa", "flash_attention_3")  # what its continuous batching can use


def stage(machine: Machine) -> Iterator[Line]:
    shape, count, longest, new = ("tiny", 3, 12, 4) if machine.dry else ("qwen3-0.6b", 256, 1024, 256)
    vocab = SHAPES[shape]["vocab_size"]
    prompts = [[token % vocab for token in prompt] for prompt in workload(count, longest)[0]]
    yield from machine.attempt("gllm", lambda: ours(machine, shape, prompts, new), 5)
    for attention in ATTENTIONS:
        name = f"transformers, {attention}"
        yield from machine.attempt(
            name, lambda attention=attention: theirs(machine, shape, prompts, new, attention), 15
        )


def ours(machine: Machine, shape: str, prompts: list[Prompt], new: int) -> list[Line]:
    small: dict[str, Any] = {"kv_blocks": 200, "threads": 1} if machine.dry else {"gpu_memory": 0.4}
    dtype = str(machine.dtype).removeprefix("torch.")
    engine = make_engine(
        shape, device=machine.device.type, dtype=dtype, max_sequences=len(prompts), max_step_tokens=None, **small
    )
    run(engine, prompts[:2], [2, 2])
    done = run(engine, prompts, [new] * len(prompts))
    name = f"gllm, {len(prompts)} requests of {new} tokens"
    return [Line(name=name, value=done.tokens / done.seconds, unit="tok/s", said=f"kernels {engine.info.kernels}")]


def theirs(machine: Machine, shape: str, prompts: list[Prompt], new: int, attention: str) -> list[Line]:
    name = f"transformers, {attention}, {len(prompts)} requests of {new} tokens"
    try:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
    except ImportError as error:
        return [not_built(name, f"{error}")]
    if "flash" in attention and machine.dry:
        return [not_built(name, "needs CUDA")]
    machine.release()
    try:
        model: Any = _model(AutoModelForCausalLM, machine, shape, attention)
    except ImportError as error:  # the package of that attention
        return [not_built(name, f"{error}"[:200])]
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes: dict[str, Any] = {"max_memory_percent": 0.4}
    if machine.dry:
        sizes = {"block_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
    options = {
        "generation_config": greedy, "continuous_batching_config": ContinuousBatchingConfig(**sizes),
        "progress_bar": False,
    }  # fmt: skip
    if not machine.dry:
        model.generate_batch(prompts[:2], **options)
    began = time.perf_counter()
    outs = model.generate_batch(prompts, **options)
    took = time.perf_counter() - began
    tokens = sum(len(out.generated_tokens) for out in outs.values())
    whole = tokens == new * len(prompts)
    return [Line(name=name, value=tokens / took, unit="tok/s", ok=None if whole else False, said=f"{tokens} tokens")]


def _model(kind: Any, machine: Machine, shape: str, attention: str) -> Any:
    from transformers import CONFIG_MAPPING

    settings: dict[str, Any] = {**SHAPES[shape], "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    with torch.device(machine.device):
        return kind.from_config(config, dtype=machine.dtype, attn_implementation=attention).eval()
