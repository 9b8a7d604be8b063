"""Tiny random checkpoints, written by transformers, which is also the oracle."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}


def build(kind: str, **changes: Any) -> PreTrainedModel:
    """A random model of a kind (a model_type), with weights large enough that tokens vary and biases matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SHAPE | changes)).float().eval()
    middle = 0.0 if kind.startswith("gemma") else 1.0  # of norm weights
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(middle - 0.5, middle + 0.5)
            else:
                parameter.normal_(0.0, 0.5 if name.endswith("bias") else 0.25)
    return model


def save(directory: Path, kind: str = "llama", **changes: Any) -> PreTrainedModel:
    model = build(kind, **changes)
    model.save_pretrained(directory)
    return model


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of a saved config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@cache
def smollm2() -> str:
    """The demo model's GGUF file."""
    from worker.models import resolve_model

    return str(resolve_model("smollm2"))
