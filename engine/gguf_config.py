"""The metadata of a GGUF file as what config.json would say, and by that as flags of the decoder."""

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from engine.errors import ModelError
from engine.gguf_families import ARCHITECTURES, CHECKED, COMMON, FACTORS, FIXED, HARMLESS, SCALINGS, Meanings
from engine.modelconfig import ModelConfig, config_of
from engine.ropeconfig import ORIGINAL
from engine.settings import Settings

END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def architecture_of(settings: Settings) -> str:
    """Raises ModelError for one that is not served."""
    name = settings.raw.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"{settings.path}: architecture {name!r} is not supported (supported: {supported})")
    return name


class MetadataReader:
    """One file's configuration: from metadata, the (Hugging Face) names of its tensors, and those of rope factors."""

    def __init__(
        self, settings: Settings, names: Collection[str], vocab_size: int, factors: Callable[[str], tuple[float, ...]]
    ) -> None:
        self._settings, self._names, self._vocab_size, self._factors = settings, names, vocab_size, factors
        self._name = architecture_of(settings)
        self._architecture = ARCHITECTURES[self._name]

    def config(self) -> ModelConfig:
        """Raises ModelError naming the key or tensor that is missing, wrong, or would change the maths."""
        kind = self._scaling()
        self._refuse_unknown(kind)
        raw = self._architecture.rules | self._translate(COMMON | self._architecture.keys)
        self._add_rope(raw, kind)
        if raw["num_hidden_layers"] == self._architecture.wide:
            raw["query_pre_attn_scalar"] = raw["hidden_size"] // raw["num_attention_heads"]
        raw |= {"vocab_size": self._vocab_size, "tie_word_embeddings": HEAD not in self._names, "dtype": "bfloat16"}
        ends = sorted({token for key in END_KEYS for token in self._settings.token_ids(key)})
        return self._with_biases(config_of(Settings(raw, self._settings.path), self._architecture.family, ends))

    def _with_biases(self, config: ModelConfig) -> ModelConfig:
        """The metadata says nothing of biases: there are those of the tensors."""

        def biased(part: str) -> bool:
            return f"model.layers.0.{part}.bias" in self._names

        return msgspec.structs.replace(
            config,
            qkv_bias=biased("self_attn.q_proj"),
            output_bias=biased("self_attn.o_proj"),
            mlp_bias=biased("mlp.gate_proj"),
        )

    def _refuse_unknown(self, kind: str) -> None:
        known = COMMON.keys() | self._architecture.keys | SCALINGS[kind].keys() | CHECKED | HARMLESS
        fixed = FIXED | self._architecture.fixed
        for key, value in self._settings.raw.items():
            name = key.removeprefix(f"{self._name}.")
            harmless = value == fixed[name] if name in fixed else name in known or value in (0, None)
            if name != key and not harmless:
                raise ModelError(f"{self._settings.path}: {key} = {value!r} is an option that gllm does not know")

    def _translate(self, meanings: Meanings) -> dict[str, Any]:
        """Values under config.json's keys; what the file does not have is left out."""
        found = {key: read(self._settings, self._key(name)) for name, (key, read) in meanings.items()}
        return {key: value for key, value in found.items() if key and value is not None}

    def _scaling(self) -> str:
        """A key of SCALINGS. A factor without a type is linear, as for llama.cpp."""
        raw = self._settings.raw
        implied = "none" if raw.get(self._key("rope.scaling.factor")) in (None, 0) else "linear"
        named = raw.get(self._key("rope.scaling.type"), implied)
        held = [kind for kind, tensors in FACTORS.items() if any(name in self._names for name in tensors)]
        kind = held[0] if held else named
        fits = named == kind if not held else named in ("none", *held) and len(held) == 1
        if not fits or kind not in self._architecture.scalings or (kind in FACTORS and not held):
            with_tensors = f" with tensor {FACTORS[held[0]][0]}" if held else ""
            message = f"rope scaling {named!r}{with_tensors} is not supported in GGUF files of {self._name}"
            raise ModelError(f"{self._settings.path}: {message}")
        return kind

    def _add_rope(self, raw: dict[str, Any], kind: str) -> None:
        scaling = self._translate(SCALINGS[kind])
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        head_dim = raw.get("head_dim", hidden // heads)
        rotated = self._rotated(head_dim)
        if rotated != head_dim:
            raw["partial_rotary_factor"] = rotated / head_dim
        if kind in FACTORS:
            factors = [list(self._plane_factors(name, rotated // 2)) for name in FACTORS[kind]]
            scaling |= {"short_factor": factors[0], "long_factor": factors[-1]}
        if kind == "llama3":  # short and long sequences are the same
            scaling |= {"attention_factor": 1.0, ORIGINAL: raw["max_position_embeddings"]}
        if kind != "none":
            raw["rope_scaling"] = {"rope_type": "longrope" if kind in FACTORS else kind} | scaling

    def _rotated(self, head_dim: int) -> int:
        """How many elements of a head rope turns: all but where the architecture allows less."""
        value, rotated = (
            self._settings.optional_count(self._key(name)) or head_dim
            for name in ("attention.value_length", "rope.dimension_count")
        )
        part = self._architecture.partial and rotated < head_dim and int(head_dim * (rotated / head_dim)) == rotated
        for name, fits in (
            ("attention.value_length", value == head_dim),
            ("rope.dimension_count", part or rotated == head_dim),
        ):
            if not fits:
                raise self._settings.refuse(self._key(name), f"the head's size, {head_dim},")
        return rotated

    def _plane_factors(self, name: str, planes: int) -> tuple[float, ...]:
        if name not in self._names:
            raise ModelError(f"{self._settings.path}: tensor {name} is missing")
        factors = self._factors(name)
        if len(factors) != planes:
            message = f"{len(factors)} factors for heads of which {2 * planes} elements are rotated"
            raise ModelError(f"{self._settings.path}: tensor {name}: {message}")
        return factors

    def _key(self, name: str) -> str:
        return f"{self._name}.{name}"
