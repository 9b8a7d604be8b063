"""What a checkpoint's config.json (or GGUF metadata) says, as flags of one decoder. Unknown switches are refused."""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from engine.errors import ModelError

# Keys that say nothing about the maths of a forward pass.
HARMLESS = frozenset(
    """_name_or_path add_cross_attention architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    dtype early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder is_llama_config
    label2id length_penalty max_length min_length mlp_dropout model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate rope_interleaved sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_version unsloth_fixed use_bfloat16 use_cache""".split()  # noqa: SIM905
)
# Keys read below.
READ = frozenset(
    """attention_bias head_dim hidden_act hidden_size intermediate_size layer_types max_position_embeddings
    max_window_layers mlp_bias num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters
    rope_scaling rope_theta sliding_window tie_word_embeddings use_sliding_window vocab_size""".split()  # noqa: SIM905
)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
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


def load_config(directory: Path) -> ModelConfig:
    """The flags of a Hugging Face checkpoint directory. Raises ModelError naming file, key and value."""
    path = directory / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{path}: model_type {family!r} is not supported (supported: {', '.join(FAMILIES)})")
    _refuse_unknown(raw, path)
    return _from_raw(raw, str(family), path, _eos_ids(raw, directory))


def _refuse_unknown(raw: dict[str, Any], path: Path) -> None:
    for key, value in raw.items():
        if key not in HARMLESS and key not in READ and value not in (None, False):
            raise ModelError(f"{path}: {key} = {value!r} is an option that gllm does not know")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act = {raw['hidden_act']!r} is not supported (supported: 'silu')")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window", True):
        raise ModelError(f"{path}: sliding_window = {raw['sliding_window']!r} is not supported yet")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ModelError(f"{path}: layer_types = {raw['layer_types']!r}: only full_attention is supported yet")


def _from_raw(raw: dict[str, Any], family: str, path: Path, eos: list[int]) -> ModelConfig:
    def need(key: str) -> int:
        value = raw.get(key)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{path}: {key}: a positive integer expected, got {value!r}")
        return value

    hidden, heads = need("hidden_size"), need("num_attention_heads")
    kv_heads = need("num_key_value_heads") if raw.get("num_key_value_heads") is not None else heads
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{path}: hidden_size {hidden} is no multiple of num_attention_heads {heads}, and no head_dim")
    head_dim = need("head_dim") if raw.get("head_dim") is not None else hidden // heads
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"{path}: {heads} heads, {kv_heads} key/value heads, head_dim {head_dim} do not fit together")
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=need("intermediate_size"),
        layers=need("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=need("max_position_embeddings"),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, path),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        dtype=_dtype(raw, path),
        eos_token_ids=eos,
    )


def _rope(raw: dict[str, Any], path: Path) -> Rope:
    """Both places and both key names that checkpoints use: rope_scaling or rope_parameters, type or rope_type."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    known = {
        "default": set[str](),
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    }
    if kind not in known:
        raise ModelError(f"{path}: rope type {kind!r} is not supported (supported: {', '.join(known)})")
    extra = {key for key, value in scaling.items() if value is not None} - known[kind]
    if unknown := sorted(extra - {"rope_type", "type", "rope_theta"}):
        raise ModelError(f"{path}: rope parameter {unknown[0]} = {scaling[unknown[0]]!r} is unknown for type {kind!r}")
    if missing := sorted(key for key in known[kind] if not isinstance(scaling.get(key), int | float)):
        raise ModelError(f"{path}: rope type {kind!r} needs a number for {missing[0]}, got {scaling.get(missing[0])!r}")
    return Rope(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=int(scaling.get("original_max_position_embeddings", 8192)),
    )


def _dtype(raw: dict[str, Any], path: Path) -> str:
    name = raw.get("dtype", raw.get("torch_dtype"))
    if name in (None, "auto"):
        return "float32"
    if name not in DTYPES:
        raise ModelError(
            f"{path}: dtype {name!r} is not supported (supported: {', '.join(sorted(set(DTYPES.values())))})"
        )
    return DTYPES[name]


def _eos_ids(raw: dict[str, Any], directory: Path) -> list[int]:
    """The union of config.json and generation_config.json; each may hold one id or a list."""
    sources = [raw.get("eos_token_id")]
    generation = directory / "generation_config.json"
    if generation.exists():
        sources.append(read_json(generation).get("eos_token_id"))
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list) else [] if source is None else [source])
    return sorted(ids)
