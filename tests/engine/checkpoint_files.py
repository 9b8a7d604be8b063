"""Damaging checkpoints: copies of the tiny ones whose files and tensors a test may change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import Engine, SamplingParams
from engine.errors import ModelError
from engine.modelconfig import load_config
from tests.engine.driving import poison, record_logits, request, run

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"
K = "model.layers.1.self_attn.k_proj.weight"


def copy_checkpoint(checkpoints: Callable[..., tuple[Path, Any]], target: Path, kind: str, **changes: Any) -> Path:
    """A copy of a tiny checkpoint, to be damaged."""
    shutil.copytree(checkpoints(kind, **changes)[0], target)
    return target


def change_config(directory: Path, **changes: Any) -> None:
    """Set keys of config.json, None included; a key given as `...` is removed."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_tensors(directory: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors; dots in names are written as `__`."""
    tensors = load_file(directory / WEIGHTS)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor.contiguous()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def shard(directory: Path, count: int = 3) -> list[str]:
    """Split model.safetensors into shards with an index, as large checkpoints are; returns the shards' names."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    placed = {name: names[position % count] for position, name in enumerate(sorted(tensors))}
    for file in names:
        held = {name: tensor for name, tensor in tensors.items() if placed[name] == file}
        save_file(held, directory / file, metadata={"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": placed}))
    return names


def change_index(directory: Path, **changes: Any) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def assert_config_refused(directory: Path, match: str) -> None:
    """The configuration is refused, and the message names the file."""
    with pytest.raises(ModelError, match=match) as error:
        load_config(directory)
    assert str(directory / "config.json") in str(error.value)


def oracle_of(directory: Path) -> PreTrainedModel:
    """What transformers makes of a directory, in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def assert_equals(engine: Engine, oracle: PreTrainedModel, length: int = 40, tolerance: float = 1e-4) -> None:
    """Logits at the prompt's end and of five greedy tokens equal the oracle's, and so do the tokens."""
    poison(engine)
    logits = record_logits(engine)
    prompt = torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    tokens = prompt + run(engine, [request("x", prompt, sampling)])["x"].tokens
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0].float()
    for position in range(length, len(tokens)):
        ours = logits["x", position]
        torch.testing.assert_close(ours, expected[position - 1], rtol=tolerance, atol=tolerance)
        assert tokens[position] == int(expected[position - 1].argmax())
