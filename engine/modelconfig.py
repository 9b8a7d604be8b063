"""What a checkpoint's config.json (or GGUF metadata) says, as flags of one decoder. Unknown switches are refused."""

from pathlib import Path
from typing import Any, Literal, TypedDict

from msgspec import Struct, field

from engine.errors import ModelError
from engine.families import (
    ACTIVATIONS,
    COMMON,
    FAMILIES,
    FIXED,
    FULL,
    HARMLESS,
    SLIDING,
    Family,
    without_rope,
)
from engine.ropeconfig import Rope, Ropes, read_ropes
from engine.settings import Settings, read_json

MOST_LAYERS, MOST_POSITIONS = 10_000, 2**24  # far beyond any model; lists and tables are made of so many
DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
}


class LayerKind(Struct, frozen=True, kw_only=True):
    """How one layer attends: `window` positions, its own among them (None: all), rotated by `rope` (None: not)."""

    window: int | None = None
    rope: Rope | None = None


class HeadShape(TypedDict):
    heads: int
    kv_heads: int
    head_dim: int


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The flags of the decoder. Sizes are counts of elements. Defaults are Llama's."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int  # as the checkpoint says, without a rope's factor
    norm_eps: float
    rope: Rope
    tied: bool
    kinds: tuple[LayerKind, ...] = ()  # one per layer; none given: all see everything, rotated by `rope`
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False  # over all heads together, not each alone
    pre_norm: bool = True
    post_norm: bool = False
    unit_offset: bool = False  # norms multiply by 1 + weight
    activation: Literal["silu", "gelu"] = "silu"
    fused: bool = False  # the files hold q, k and v as one tensor, and gate and up as another
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False  # the embedding's multiplier is rounded to the weights' dtype
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    scaled_limit: bool = False  # max_positions has the rope's factor in it already
    dtype: str = "float32"  # what the checkpoint says; the fixed table above
    eos_token_ids: list[int] = field(default_factory=list)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return self.kinds or (LayerKind(rope=self.rope),) * self.layers

    @property
    def ropes(self) -> list[Rope]:
        """The different ropes of the layers, in order of their first use."""
        return list(dict.fromkeys(kind.rope for kind in self.layer_kinds if kind.rope is not None))

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def position_limit(self) -> int:
        return self.max_positions if self.scaled_limit else int(self.max_positions * self.rope.limit_factor)


def load_config(directory: Path) -> ModelConfig:
    """The flags of a Hugging Face checkpoint directory. Raises ModelError naming file, key and value."""
    path = directory / "config.json"
    raw = read_json(path)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ModelError(f"{path}: model_type {name!r} is not supported (supported: {supported})")
    family = FAMILIES[name]
    raw = family.defaults | raw
    _refuse_unknown(raw, family, path)
    return config_of(Settings(raw, path), name, _eos_ids(raw, directory))


def _refuse_unknown(raw: dict[str, Any], family: Family, path: Path) -> None:
    known, fixed = COMMON | HARMLESS | family.keys, FIXED | family.ignored
    for key, value in raw.items():
        off = value is None or value == {} or (value is False and key not in fixed)
        if not (off or key in known or (key in fixed and value == fixed[key])):
            raise ModelError(f"{path}: {key} = {value!r} is an option that gllm does not know")


def config_of(settings: Settings, name: str, eos: list[int]) -> ModelConfig:
    """The flags of a family `name` with the `settings` of a config.json in which nothing is unknown."""
    family, hidden = FAMILIES[name], settings.count("hidden_size")
    heads, kv_heads = settings.count("num_attention_heads"), settings.optional_count("num_key_value_heads")
    shape = head_shape(settings.path, hidden, heads, kv_heads, settings.optional_count("head_dim"))
    layers, bias = settings.count("num_hidden_layers", MOST_LAYERS), settings.flag("attention_bias")
    ropes = read_ropes(settings, family, shape["head_dim"])
    return ModelConfig(
        family=name,
        vocab_size=settings.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.count("intermediate_size"),
        layers=layers,
        max_positions=settings.count("max_position_embeddings", MOST_POSITIONS),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=ropes.full,
        tied=settings.flag("tie_word_embeddings"),
        kinds=_layer_kinds(settings, family, layers, ropes),
        qkv_bias=bias or family.qkv_bias,
        output_bias=bias and not family.qkv_bias,
        mlp_bias=settings.flag("mlp_bias"),
        qk_norm=family.qk_norm != "",
        joint_qk_norm=family.qk_norm == "projection",
        pre_norm=family.pre_norm,
        post_norm=family.post_norm,
        unit_offset=family.unit_offset,
        fused=family.fused,
        scaled_limit=family.scaled_limit,
        dtype=_dtype(settings),
        eos_token_ids=eos,
        **shape,
        **_multipliers(settings, family, hidden),
    )


def _multipliers(settings: Settings, family: Family, hidden: int) -> dict[str, Any]:
    """The activation, and every number that scales or bends something on the way."""
    activation = settings.raw.get(family.activation_key, "silu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise settings.refuse(family.activation_key, f"one of {', '.join(ACTIVATIONS)}")
    scalar = settings.optional_number("query_pre_attn_scalar")
    return {
        "activation": ACTIVATIONS[activation],
        "attention_scale": settings.optional_number("attention_multiplier") if scalar is None else scalar**-0.5,
        "attention_softcap": settings.optional_number("attn_logit_softcapping"),
        "logits_softcap": settings.optional_number("final_logit_softcapping"),
        "embedding_multiplier": hidden**0.5
        if family.scaled_embedding
        else settings.number("embedding_multiplier", 1.0),
        "rounds_multiplier": family.scaled_embedding,
        "residual_multiplier": settings.number("residual_multiplier", 1.0),
        "logits_divisor": settings.number("logits_scaling", 1.0),
    }


def _layer_kinds(settings: Settings, family: Family, layers: int, ropes: Ropes) -> tuple[LayerKind, ...]:
    types = _layer_types(settings, family, layers)
    window = settings.count("sliding_window") if SLIDING in types else None
    if window is not None and settings.raw.get("use_sliding_window") is False:
        raise settings.refuse("use_sliding_window", f"true, as layer_types has {SLIDING},")
    bare = without_rope(settings, layers)
    return tuple(
        LayerKind(
            window=window if kind == SLIDING else None,
            rope=None if number in bare else ropes.sliding if kind == SLIDING else ropes.full,
        )
        for number, kind in enumerate(types)
    )


def _layer_types(settings: Settings, family: Family, layers: int) -> list[str]:
    given = settings.words("layer_types", (FULL, SLIDING), layers)
    if given is not None and not family.fixed_layer_types:
        return given
    types = family.layer_types(settings, layers)
    if given not in (None, types):
        raise settings.refuse("layer_types", str(types))
    return types


def head_shape(path: Path, hidden: int, heads: int, kv_heads: int | None, head_dim: int | None) -> HeadShape:
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
