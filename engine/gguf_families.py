"""The architectures of GGUF files: for each the family it is, and how its file differs from that family's directory.

The names are those of the `gguf` package; what converters do to tensors, and what a file leaves out, follows llama.cpp,
for which these files are made. docs/fidelity.md has the rules for people.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from engine.ropeconfig import ORIGINAL
from engine.settings import Settings

Meanings = dict[str, tuple[str, Callable[[Settings, str], Any]]]  # key -> (config.json's key, how its value is read)


def zero_is_none(settings: Settings, key: str) -> int | None:
    return None if settings.raw.get(key) == 0 else settings.optional_count(key)


def unread(settings: Settings, key: str) -> None:
    """A number that llama.cpp leaves aside as well."""


# Metadata of every architecture, without the architecture's name before it.
COMMON: Meanings = {
    "attention.head_count": ("num_attention_heads", Settings.count),
    "attention.head_count_kv": ("num_key_value_heads", Settings.optional_count),
    "attention.key_length": ("head_dim", Settings.optional_count),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", Settings.number),
    "block_count": ("num_hidden_layers", Settings.count),
    "context_length": ("max_position_embeddings", Settings.count),
    "embedding_length": ("hidden_size", Settings.count),
    "feed_forward_length": ("intermediate_size", Settings.count),
    "rope.freq_base": ("rope_theta", Settings.optional_number),
}
# Metadata that is compared with the rest, or says nothing about the maths.
CHECKED = frozenset({"attention.value_length", "rope.dimension_count", "rope.scaling.type"})
HARMLESS = frozenset(
    {"rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout", "vocab_size"}
)

# How rope is scaled: by numbers in the metadata, or by a factor for each plane in tensors of these names.
FACTORS = {
    "llama3": ("rope_freqs.weight",),
    "longrope": ("rope_factors_short.weight", "rope_factors_long.weight"),
}
_FACTOR = ("factor", Settings.number)
_ORIGINAL = "rope.scaling.original_context_length"
SCALINGS: dict[str, Meanings] = {
    "none": {"rope.scaling.factor": ("", unread)},
    "linear": {"rope.scaling.factor": _FACTOR, _ORIGINAL: (ORIGINAL, Settings.optional_count)},
    "yarn": {
        "rope.scaling.factor": _FACTOR,
        _ORIGINAL: (ORIGINAL, Settings.optional_count),
        "rope.scaling.yarn_beta_fast": ("beta_fast", Settings.optional_number),
        "rope.scaling.yarn_beta_slow": ("beta_slow", Settings.optional_number),
    },
    "llama3": {},
    "longrope": {
        "rope.scaling.attn_factor": ("attention_factor", Settings.number),
        _ORIGINAL: (ORIGINAL, Settings.count),
    },
}
# Metadata that may be there with this value only: it is what is computed without it.
FIXED = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0}

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_NORMS_ON_BOTH_SIDES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Architecture(Struct, frozen=True, kw_only=True):
    """One architecture. `family` is a key of FAMILIES.

    `keys` are read beside the common ones, `fixed` may be there with this value only, `rules` is what holds where the
    file is silent, by config.json's keys; `names` are a block's tensors that BLOCK_NAMES has not, or calls otherwise.
    """

    family: str
    keys: Meanings = field(default_factory=dict[str, tuple[str, Callable[[Settings, str], Any]]])
    fixed: dict[str, Any] = field(default_factory=dict[str, Any])
    rules: dict[str, Any] = field(default_factory=dict[str, Any])
    names: dict[str, str] = field(default_factory=dict[str, str])
    scalings: tuple[str, ...] = ("none", "linear", "yarn")
    interleaved: bool = False  # rows of q and k are ordered for a rope that turns neighbours, not halves
    partial: bool = False  # rope.dimension_count may be less than a head
    wide: int | None = None  # the model of so many layers scales attention by hidden size / heads, not by the head's


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
_GEMMA_KEYS: Meanings = {
    "attention.sliding_window_pattern": ("sliding_window_pattern", Settings.optional_count),
    "final_logit_softcapping": ("final_logit_softcapping", Settings.optional_number),
}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(family="llama", interleaved=True, scalings=("none", "linear", "yarn", "llama3")),
    "mistral3": Architecture(family="llama", interleaved=True, scalings=("none", "llama3")),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3"),
    "phi3": Architecture(
        family="phi3",
        keys={"attention.sliding_window": ("sliding_window", zero_is_none)},
        names=_FUSED,
        scalings=("none", "longrope"),
        partial=True,
    ),
    "gemma2": Architecture(
        family="gemma2",
        keys=_GEMMA_KEYS
        | {
            "attention.sliding_window": ("sliding_window", Settings.optional_count),
            "attn_logit_softcapping": ("attn_logit_softcapping", Settings.optional_number),
        },
        rules=_GEMMA | {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        names=_NORMS_ON_BOTH_SIDES,
        scalings=("none",),
        wide=46,
    ),
    "gemma3": Architecture(
        family="gemma3_text",
        keys=_GEMMA_KEYS
        | {
            "attention.sliding_window": ("sliding_window", Settings.count),
            "rope.freq_base_swa": ("rope_local_base_freq", Settings.optional_number),
        },
        rules=_GEMMA | {"rope_local_base_freq": 10000.0},
        names=_NORMS_ON_BOTH_SIDES,
        scalings=("none", "linear"),
        wide=62,
    ),
    "granite": Architecture(
        family="granite",
        keys={
            "attention.scale": ("attention_multiplier", Settings.optional_number),
            "embedding_scale": ("embedding_multiplier", Settings.optional_number),
            "logit_scale": ("logits_scaling", Settings.number),
            "residual_scale": ("residual_multiplier", Settings.optional_number),
        },
        fixed={"rope.scaling.finetuned": True},  # where it is false, llama.cpp does not rotate
        interleaved=True,
        scalings=("none", "linear", "yarn", "llama3"),
    ),
    "olmo2": Architecture(family="olmo2", names=_NORMS_ON_BOTH_SIDES),
    "smollm3": Architecture(family="smollm3", rules={"no_rope_layer_interval": 4}, interleaved=True),
}
