"""GGUF checkpoints: metadata to flags, and tensors under the names that Hugging Face gives them."""

from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.gguf_head import ALIGNMENT, read_head
from engine.gguf_tensors import GgufTensors
from engine.modelconfig import ModelConfig, Rope, Settings, head_shape

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
# Metadata of an architecture that is read, or says nothing about the maths. Anything else is refused.
KNOWN_KEYS = frozenset(
    """attention.head_count attention.head_count_kv attention.key_length attention.layer_norm_rms_epsilon
    attention.value_length block_count context_length embedding_length feed_forward_length rope.dimension_count
    rope.freq_base rope.scaling.factor rope.scaling.finetuned rope.scaling.type tensor_data_layout
    vocab_size""".split()  # noqa: SIM905
)
CAUSAL = "attention.causal"  # must be true where it is there: false is not "off", but attention in both directions
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
ROPE_FACTORS = "rope_freqs.weight"  # part of the configuration, although a tensor
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufSource:
    """The tensors of one .gguf file under their Hugging Face names, dequantised as they are read."""

    def __init__(self, path: Path) -> None:
        self._path, self.place = path, str(path)
        metadata, infos = read_head(path)
        self._settings = Settings(metadata, path)
        self._refuse_parts()
        self._names = {self._hf_name(info.name): info.name for info in infos}
        if len(self._names) < len(infos):
            raise ModelError(f"{path}: two tensors have the same name")
        self._tensors = GgufTensors(path, infos, metadata.get("general.alignment", ALIGNMENT))
        self.config = self._read_config()

    def names(self) -> set[str]:
        return set(self._names) - {ROPE_FACTORS}

    def where(self, name: str) -> str:
        return str(self._path)

    def shape(self, name: str) -> list[int]:
        return self._tensors.shape(self._names[name])

    def read(self, name: str) -> Tensor:
        """The whole tensor in float32."""
        found = torch.empty(self.shape(name))
        self.copy(name, found)
        return found

    def copy(self, name: str, target: Tensor) -> None:
        """Write the tensor into `target`, which has its shape, in the dtype of `target`."""
        self._tensors.copy(self._names[name], target, self._rows(name))

    def _rows(self, name: str) -> Tensor | None:
        """Where each row belongs: llama's q and k are stored for interleaved rope, ours (and HF's) rotates halves."""
        part = name.rpartition(".")[0].rpartition(".")[2]
        if part not in ("q_proj", "k_proj") or self.config.family != "llama":
            return None
        heads = self.config.heads if part == "q_proj" else self.config.kv_heads
        halves = torch.arange(self.shape(name)[0]).view(heads, 2, -1)
        return halves.transpose(1, 2).reshape(-1)

    def _refuse_parts(self) -> None:
        count = self._settings.raw.get("split.count", 1)
        if count != 1:
            message = f"it is one of {count} parts (split.count); join them first, with llama-gguf-split --merge"
            raise ModelError(f"{self._path}: {message}")

    def _hf_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in TOP_NAMES:
            return f"{TOP_NAMES[stem]}.{suffix}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
            return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{suffix}"
        return name

    def _read_config(self) -> ModelConfig:
        family, settings = self._read_family(), self._settings
        if "model.embed_tokens.weight" not in self._names:
            raise ModelError(f"{self._path}: tensor token_embd.weight is missing")
        hidden, heads = settings.count(f"{family}.embedding_length"), settings.count(f"{family}.attention.head_count")
        kv_heads = settings.optional_count(f"{family}.attention.head_count_kv")
        head_dim = settings.optional_count(f"{family}.attention.key_length")
        shape = head_shape(self._path, hidden, heads, kv_heads, head_dim)
        for key in ("rope.dimension_count", "attention.value_length"):
            if settings.optional_count(f"{family}.{key}") not in (None, shape["head_dim"]):
                raise settings.refuse(f"{family}.{key}", f"the head's size, {shape['head_dim']},")
        rope = self._read_rope(family)
        if rope.short_factors and len(rope.short_factors) != shape["head_dim"] // 2:
            message = f"{len(rope.short_factors)} factors for heads of {shape['head_dim']}"
            raise ModelError(f"{self._path}: tensor {ROPE_FACTORS}: {message}")
        return ModelConfig(
            family=family,
            vocab_size=int(self.shape("model.embed_tokens.weight")[0]),
            hidden_size=hidden,
            intermediate_size=settings.count(f"{family}.feed_forward_length"),
            layers=settings.count(f"{family}.block_count"),
            max_positions=settings.count(f"{family}.context_length"),
            norm_eps=settings.number(f"{family}.attention.layer_norm_rms_epsilon"),
            rope=rope,
            tied="lm_head.weight" not in self._names,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._names,
            output_bias="model.layers.0.self_attn.o_proj.bias" in self._names,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in self._names,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in self._names,
            dtype="bfloat16",
            eos_token_ids=sorted({token for key in END_KEYS for token in settings.token_ids(key)}),
            **shape,
        )

    def _read_family(self) -> str:
        """The architecture, once nothing in its metadata is unknown."""
        family = self._settings.raw.get("general.architecture")
        if family not in FAMILIES:
            supported = ", ".join(FAMILIES)
            raise ModelError(f"{self._path}: architecture {family!r} is not supported (supported: {supported})")
        for key, value in self._settings.raw.items():
            name = key.removeprefix(f"{family}.")
            harmless = value is True if name == CAUSAL else name in KNOWN_KEYS or value in (0, None)
            if name != key and not harmless:
                raise ModelError(f"{self._path}: {key} = {value!r} is an option that gllm does not know")
        return family

    def _read_rope(self, family: str) -> Rope:
        settings, scaling = self._settings, self._settings.raw.get(f"{family}.rope.scaling.type", "none")
        factors = self._rope_factors()
        if scaling not in ("none", "linear") or (factors and scaling != "none"):
            raise ModelError(f"{self._path}: rope scaling {scaling!r} is not supported in GGUF files yet")
        theta = settings.number(f"{family}.rope.freq_base", 10000.0)
        if factors:
            limit = settings.count(f"{family}.context_length")
            return Rope(
                theta=theta,
                kind="longrope",  # of which short and long sequences are the same
                short_factors=factors,
                long_factors=factors,
                max_positions=limit,
                original_max_positions=limit,
            )
        if scaling == "none":
            return Rope(theta=theta)
        return Rope(theta=theta, kind=scaling, factor=settings.number(f"{family}.rope.scaling.factor"))

    def _rope_factors(self) -> tuple[float, ...]:
        """What each plane's frequency is divided by: how converters write the rope of Llama 3.1 and later."""
        if ROPE_FACTORS not in self._names:
            return ()
        factors = self.read(ROPE_FACTORS)
        if factors.dim() != 1 or not bool(((factors > 0) & torch.isfinite(factors)).all()):
            raise ModelError(f"{self._path}: tensor {ROPE_FACTORS}: a list of positive numbers expected")
        return tuple(factors.tolist())
