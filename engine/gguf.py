"""GGUF checkpoints: metadata to flags, and tensors dequantised one by one through the `gguf` package."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.errors import ModelError
from engine.gguf_head import TensorInfo, read_head
from engine.modelconfig import ModelConfig, Rope

FAMILIES = ("llama", "qwen2", "qwen3")
# GGUF's names for a block's tensors, and Hugging Face's.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufSource:
    """The tensors of one .gguf file under their Hugging Face names, dequantised to float32 as they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata, infos = read_head(path)
        self._data = np.memmap(path, np.uint8, "r")
        self._tensors = {self._hf_name(info.name): info for info in infos}
        self.config = self._read_config()

    def names(self) -> set[str]:
        return set(self._tensors)

    def where(self, name: str) -> str:
        return str(self._path)

    def read(self, name: str) -> Tensor:
        info = self._tensors[name]
        try:
            kind = GGMLQuantizationType(info.kind)
            values = dequantize(self._bytes(info, kind), kind)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(f"{self._path}: tensor {info.name} cannot be read: {error}") from None
        owned = values if values.flags.writeable else values.copy()  # torch takes no read-only memory
        return self._unpermute(name, torch.from_numpy(owned).reshape(info.shape[::-1]))

    def _bytes(self, info: TensorInfo, kind: GGMLQuantizationType) -> np.ndarray:
        """The tensor as it lies in the file, uint8 [rows, bytes of a row]."""
        block, size = GGML_QUANT_SIZES[kind]
        row = info.shape[0] // block * size
        count = row * int(np.prod(info.shape[1:], dtype=np.int64))
        data = self._data[info.offset : info.offset + count]
        if len(data) < count or info.shape[0] % block:
            raise ValueError(f"{count} bytes expected at byte {info.offset}, the file has {len(data)}")
        return np.asarray(data).reshape(-1, row)

    def _unpermute(self, name: str, weight: Tensor) -> Tensor:
        """Llama's q and k rows are stored for interleaved rope; ours (and Hugging Face's) rotates halves."""
        heads = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads}.get(name.split(".")[-2], 0)
        if self.config.family != "llama" or not heads:
            return weight
        pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)

    def _hf_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in TOP_NAMES:
            return f"{TOP_NAMES[stem]}.{suffix}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
            return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{suffix}"
        return name

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(key, default)

    def _need(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise ModelError(f"{self._path}: {key} is missing from the metadata")
        return value

    def _read_config(self) -> ModelConfig:
        family = self._get("general.architecture")
        if family not in FAMILIES:
            raise ModelError(
                f"{self._path}: architecture {family!r} is not supported (supported: {', '.join(FAMILIES)})"
            )
        hidden, heads = self._need(f"{family}.embedding_length"), self._need(f"{family}.attention.head_count")
        vocab_size = int(self._tensors["model.embed_tokens.weight"].shape[1])
        scaling = self._get(f"{family}.rope.scaling.type", "none")
        if scaling not in ("none", "linear") or "rope_freqs.weight" in self._tensors:
            raise ModelError(f"{self._path}: rope scaling {scaling!r} is not supported in GGUF files yet")
        factor = float(self._get(f"{family}.rope.scaling.factor", 1.0))
        return ModelConfig(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=self._need(f"{family}.feed_forward_length"),
            layers=self._need(f"{family}.block_count"),
            heads=heads,
            kv_heads=self._get(f"{family}.attention.head_count_kv", heads),
            head_dim=self._get(f"{family}.attention.key_length", hidden // heads),
            max_positions=self._need(f"{family}.context_length"),
            norm_eps=float(self._need(f"{family}.attention.layer_norm_rms_epsilon")),
            rope=Rope(
                theta=float(self._get(f"{family}.rope.freq_base", 10000.0)),
                kind="default" if scaling == "none" else scaling,
                factor=factor,
            ),
            tied="lm_head.weight" not in self._tensors,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            output_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in self._tensors,
            dtype="bfloat16",
            eos_token_ids=self._eos_ids(),
        )

    def _eos_ids(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return sorted({int(value) for key in keys if (value := self._get(key)) is not None})
