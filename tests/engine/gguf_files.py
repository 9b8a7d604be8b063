"""Writing small GGUF files as converters do: GGUF's names, and the tensors as each architecture stores them."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from transformers import PreTrainedModel

F32 = GGMLQuantizationType.F32
ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}  # the others are called as the model_type
INTERLEAVED = ("llama", "mistral3", "granite", "smollm3")  # rope of neighbouring elements
NUMBERS = {MODEL_ARCH_NAMES[number]: number for number in MODEL_ARCH}
SCALING_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
# What converters write for some families beside what all have: GGUF's key, config.json's.
MORE_KEYS = {
    "gemma2": {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"},
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "phi3": {"attention.sliding_window": "sliding_window"},
}


def architecture_of(model: PreTrainedModel) -> str:
    return ARCHITECTURES.get(model.config.model_type, model.config.model_type)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotating halves -> rows of rotating neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def settings_of(model: PreTrainedModel) -> dict[str, Any]:
    config, architecture = model.config, architecture_of(model)
    settings = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    settings |= _rope_settings(config.rope_parameters)
    if (head_dim := getattr(config, "head_dim", None)) is not None and architecture != "granite":
        settings |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    more = {key: getattr(config, name) for key, name in MORE_KEYS.get(architecture, {}).items()}
    if architecture == "phi3":
        head_dim = config.hidden_size // config.num_attention_heads
        more["rope.dimension_count"] = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        more["attention.sliding_window"] = config.sliding_window or 0
    return {f"{architecture}.{key}": value for key, value in (settings | more).items() if value is not None}


def _rope_settings(parameters: dict[str, Any]) -> dict[str, Any]:
    rope = parameters.get("full_attention", parameters)
    settings: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        settings["rope.scaling.type"] = rope["rope_type"]
        settings |= {f"rope.scaling.{SCALING_KEYS[key]}": rope[key] for key in SCALING_KEYS if rope.get(key)}
    if rope["rope_type"] == "longrope":
        settings["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        settings["rope.scaling.attn_factor"] = rope["attention_factor"]
    return settings


def tensors_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """GGUF names and values of a model's tensors, and rope's factors; a tied head is left out."""
    architecture = architecture_of(model)
    names = get_tensor_name_map(NUMBERS[architecture], model.config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.named_parameters():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"the gguf package has no name for {name}"
        tensors[found] = stored(name, parameter.detach().float().numpy(), architecture, model.config)
    for length in ("short", "long"):
        if factors := model.config.rope_parameters.get(f"{length}_factor"):
            tensors[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
    return tensors


def stored(name: str, weight: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads and architecture in INTERLEAVED:
        return interleave(weight, heads)
    return weight + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else weight


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
