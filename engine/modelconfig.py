"""What a checkpoint's config.json (or GGUF metadata) says, as flags of one decoder. Unknown switches are refused."""

import json
import math
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from engine.errors import ModelError

# Keys that say nothing about the maths of a forward pass.
HARMLESS = frozenset(
    """_attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout
    attn_implementation attn_pdrop auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    classifier_dropout decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id hidden_dropout id2label initializer_range is_decoder is_llama_config label2id length_penalty
    max_length min_length mlp_dropout model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unsloth_version unsloth_fixed use_bfloat16
    use_cache""".split()  # noqa: SIM905
)
# Keys read below.
READ = frozenset(
    """attention_bias head_dim hidden_act hidden_size intermediate_size layer_types max_position_embeddings
    max_window_layers mlp_bias num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters
    rope_scaling rope_theta sliding_window tie_word_embeddings use_sliding_window vocab_size""".split()  # noqa: SIM905
)
# What transformers takes for a key that is absent (null is something else), where families differ.
QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128},
}
# The rope types and the parameters that each of them needs.
ROPE_PARAMETERS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
}


class Rope(Struct, frozen=True, kw_only=True):
    """Rotary embedding: `kind` default, linear or llama3, with the factors that kind reads."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The flags of the decoder. Sizes are counts of elements."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"  # what the checkpoint says; the fixed table above
    eos_token_ids: list[int] = field(default_factory=list)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: a JSON object expected, got {type(content).__name__}")
    return content


class Settings:
    """One JSON object: its values by key, checked. Raises ModelError naming file, key and value."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self.raw, self.path = raw, path

    def refuse(self, key: str, expected: str) -> ModelError:
        return ModelError(f"{self.path}: {key}: {expected} expected, got {self.raw.get(key)!r}")

    def count(self, key: str) -> int:
        value = self.raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(key, "a positive integer")
        return value

    def optional_count(self, key: str) -> int | None:
        return None if self.raw.get(key) is None else self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refuse(key, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return bool(value)

    def token_ids(self, key: str) -> set[int]:
        """One id, a list of them, or null."""
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self.refuse(key, "a token id or a list of them")
        return set(ids)


def load_config(directory: Path) -> ModelConfig:
    """The flags of a Hugging Face checkpoint directory. Raises ModelError naming file, key and value."""
    path = directory / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILY_DEFAULTS:
        supported = ", ".join(FAMILY_DEFAULTS)
        raise ModelError(f"{path}: model_type {family!r} is not supported (supported: {supported})")
    raw = FAMILY_DEFAULTS[family] | raw
    _refuse_unknown(raw, path)
    return _from_settings(Settings(raw, path), family, _eos_ids(raw, directory))


def _refuse_unknown(raw: dict[str, Any], path: Path) -> None:
    for key, value in raw.items():
        if key not in HARMLESS and key not in READ and not (value is None or value is False or value == {}):
            raise ModelError(f"{path}: {key} = {value!r} is an option that gllm does not know")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{path}: hidden_act = {raw['hidden_act']!r} is not supported (supported: 'silu')")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window", True):
        raise ModelError(f"{path}: sliding_window = {raw['sliding_window']!r} is not supported yet")
    layers = raw.get("layer_types") or []
    if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        raise ModelError(f"{path}: layer_types = {layers!r}: only full_attention is supported yet")


def _from_settings(settings: Settings, family: str, eos: list[int]) -> ModelConfig:
    bias, hidden = settings.flag("attention_bias"), settings.count("hidden_size")
    heads, kv_heads = settings.count("num_attention_heads"), settings.optional_count("num_key_value_heads")
    return ModelConfig(
        family=family,
        vocab_size=settings.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.count("intermediate_size"),
        layers=settings.count("num_hidden_layers"),
        max_positions=settings.count("max_position_embeddings"),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=_rope(settings),
        tied=settings.flag("tie_word_embeddings"),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=settings.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        dtype=_dtype(settings),
        eos_token_ids=eos,
        **head_shape(settings.path, hidden, heads, kv_heads, settings.optional_count("head_dim")),
    )


def head_shape(path: Path, hidden: int, heads: int, kv_heads: int | None, head_dim: int | None) -> dict[str, int]:
    """The fields of a head's shape, with what is not given derived. Raises ModelError if they do not fit together."""
    kv_heads = heads if kv_heads is None else kv_heads
    if head_dim is None and hidden % heads:
        message = f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and no head_dim"
        raise ModelError(f"{path}: {message}")
    head_dim = hidden // heads if head_dim is None else head_dim
    if heads % kv_heads or head_dim % 2:
        message = f"{heads} heads, {kv_heads} key/value heads, head_dim {head_dim} do not fit together"
        raise ModelError(f"{path}: {message}")
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}


def _rope(settings: Settings) -> Rope:
    """Both places and both key names that checkpoints use: rope_scaling or rope_parameters, type or rope_type."""
    found = _rope_scaling(settings)
    kind = found.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_PARAMETERS:
        supported = ", ".join(ROPE_PARAMETERS)
        raise ModelError(f"{settings.path}: rope type {kind!r} is not supported (supported: {supported})")
    if unknown := sorted(found.keys() - ROPE_PARAMETERS[kind] - {"rope_theta"}):
        message = f"rope parameter {unknown[0]} = {found[unknown[0]]!r} is unknown for type {kind!r}"
        raise ModelError(f"{settings.path}: {message}")
    found.setdefault("rope_theta", 10000.0 if settings.raw.get("rope_theta") is None else settings.raw["rope_theta"])
    scaling = Settings(found, settings.path)
    values = {name: scaling.number(name) for name in ROPE_PARAMETERS[kind]}
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise scaling.refuse("high_freq_factor", f"more than low_freq_factor = {values['low_freq_factor']}")
    original = int(values.pop("original_max_position_embeddings", Rope().original_max_positions))
    return Rope(theta=scaling.number("rope_theta"), kind=kind, original_max_positions=original, **values)


def _rope_scaling(settings: Settings) -> dict[str, Any]:
    """The rope parameters that are given, the type under the name rope_type. Two different sets are refused."""
    sets: list[dict[str, Any]] = []
    for place in ("rope_parameters", "rope_scaling"):
        given = settings.raw.get(place) or {}
        if not isinstance(given, dict):
            raise settings.refuse(place, "an object")
        given = {key: value for key, value in given.items() if value is not None}
        older_name = given.pop("type", None)
        sets.append(given if older_name is None else {"rope_type": older_name} | given)
    newer, older = sets
    if newer and any(newer.get(key) != value for key, value in older.items()):
        raise settings.refuse("rope_scaling", f"the same as rope_parameters, {newer!r},")
    return newer or older


def _dtype(settings: Settings) -> str:
    name = next((settings.raw[key] for key in ("dtype", "torch_dtype") if settings.raw.get(key) is not None), "auto")
    if name == "auto":
        return "float32"
    if not isinstance(name, str) or name not in DTYPES:
        supported = ", ".join(sorted(set(DTYPES.values())))
        raise ModelError(f"{settings.path}: dtype {name!r} is not supported (supported: {supported})")
    return DTYPES[name]


def _eos_ids(raw: dict[str, Any], directory: Path) -> list[int]:
    """The union of config.json and generation_config.json; each may hold one id or a list."""
    ids = Settings(raw, directory / "config.json").token_ids("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.exists():
        ids |= Settings(read_json(generation), generation).token_ids("eos_token_id")
    return sorted(ids)
