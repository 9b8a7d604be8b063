"""Checkpoints without files: the shape of a model that people know, with random weights made where they are needed."""

import json
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine import Engine, EngineConfig
from engine.modelconfig import ModelConfig, load_config
from engine.weights import Source

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 16384, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 16384, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    },
    "tiny": {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500,
        "tie_word_embeddings": True, "max_position_embeddings": 1024, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
SCALE = 0.02  # of weights, as models are initialised; norms are near 1


class RandomSource:
    """Tensors by name, made on the device that wants them; or on a CPU, for the same numbers on every device."""

    place = "random weights"

    def __init__(self, config: ModelConfig, *, on_device: bool) -> None:
        self._shapes, self._on_device = tensor_shapes(config), on_device

    def names(self) -> set[str]:
        return set(self._shapes)

    def where(self, name: str) -> str:
        return self.place

    def shape(self, name: str) -> list[int]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        made = torch.empty(self._shapes[name])
        self._make(name, made)
        return made

    def copy(self, name: str, target: Tensor) -> None:
        if self._on_device:
            self._make(name, target)
        else:
            target.copy_(self.read(name))

    def _make(self, name: str, target: Tensor) -> None:
        seed = zlib.crc32(name.encode())
        target.normal_(
            1.0 if "norm" in name else 0.0, SCALE, generator=torch.Generator(target.device).manual_seed(seed)
        )


def tensor_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """The tensors of a Llama or Qwen3 checkpoint."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * width, config.kv_heads * width
    layer = {
        "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
        "self_attn.q_proj": [queries, hidden], "self_attn.k_proj": [keys, hidden], "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner],
    }  # fmt: skip
    if config.qk_norm:
        layer |= {"self_attn.q_norm": [width], "self_attn.k_norm": [width]}
    shapes = {"model.embed_tokens.weight": [config.vocab_size, hidden], "model.norm.weight": [hidden]}
    if not config.tied:
        shapes["lm_head.weight"] = [config.vocab_size, hidden]
    for number in range(config.layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


@contextmanager
def open_random(model: str, *, on_device: bool) -> Iterator[tuple[ModelConfig, Source, str]]:
    """As engine.weights.open_checkpoint, for a name in SHAPES."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[model]))
        config = load_config(Path(folder))
    yield config, RandomSource(config, on_device=on_device), f"random {model}"


def make_engine(shape: str, *, on_device: bool = True, **settings: Any) -> Engine:
    """An engine on random weights of a known shape."""
    with patch("engine.runner.open_checkpoint", partial(open_random, on_device=on_device)):
        return Engine(EngineConfig(model=shape, **settings))
