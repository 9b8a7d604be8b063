"""Writing small GGUF files as converters do: GGUF's names, and Llama's q and k rows ordered for interleaved rope."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import PreTrainedModel

from engine.gguf import BLOCK_NAMES, TOP_NAMES

F32 = GGMLQuantizationType.F32
_BLOCKS = {hf: name for name, hf in BLOCK_NAMES.items()}
_TOPS = {hf: name for name, hf in TOP_NAMES.items()}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOPS:
        return f"{_TOPS[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_BLOCKS[part]}.{suffix}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotating halves -> rows of rotating neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def settings_of(model: PreTrainedModel) -> dict[str, Any]:
    config, family = model.config, model.config.model_type
    settings = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if family == "qwen3":
        settings |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    return {f"{family}.{key}": value for key, value in settings.items()}


def tensors_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """GGUF names and values of a model's tensors; a tied head is left out."""
    config, tensors = model.config, {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and config.model_type == "llama":
            weight = interleave(weight, heads)
        tensors[gguf_name(name)] = weight
    return tensors


def write_gguf(
    path: Path,
    settings: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: GGMLQuantizationType = F32,
    architecture: str = "llama",
) -> Path:
    """Matrices are stored as `kind`, vectors in float32. A setting of None is left out."""
    writer = GGUFWriter(path, architecture)
    for key, value in settings.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or kind is F32:
            writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
