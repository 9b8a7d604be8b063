"""The model families, each as data for one decoder: what their config.json may say, and what they mean without saying.

A family is a row of `FAMILIES`. What a key of config.json decides is read in engine/modelconfig.py; what follows from
the family's name alone stands here. docs/engine.md has the same table for people.
"""

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct, field

from engine.settings import Settings

FULL, SLIDING = "full_attention", "sliding_attention"
LayerTypes = Callable[[Settings, int], list[str]]

# Keys that every family reads.
COMMON = frozenset(
    """head_dim hidden_act hidden_size intermediate_size layer_types max_position_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads original_max_position_embeddings rms_norm_eps rope_parameters rope_scaling
    rope_theta tie_word_embeddings vocab_size""".split()  # noqa: SIM905
)
# Keys that say nothing about the maths of a forward pass.
HARMLESS = frozenset(
    """_attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern architectures
    attention_dropout
    attn_implementation attn_pdrop auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward classifier_dropout decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    embd_pdrop encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id hidden_dropout id2label initializer_range is_decoder is_llama_config
    label2id length_penalty max_length min_length mlp_dropout model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unsloth_version unsloth_fixed use_bfloat16
    use_cache""".split()  # noqa: SIM905
)

# Keys that may be there with this value only. False turns something off in all others, but changes the maths here.
FIXED = {"is_causal": True}


def every_layer(settings: Settings, layers: int) -> list[str]:
    """A window, where there is one, is every layer's."""
    return [SLIDING if settings.given("sliding_window") else FULL] * layers


def upper_layers(settings: Settings, layers: int) -> list[str]:
    """Qwen: the window is for the layers from max_window_layers on, and off without its switch."""
    if not windows_are_on(settings):
        return [FULL] * layers
    first = settings.raw.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise settings.refuse("max_window_layers", "a number of layers")
    return [SLIDING if number >= first else FULL for number in range(layers)]


def unrotated_layers(settings: Settings, layers: int) -> list[str]:
    """SmolLM3: a window, if it is on, is for the layers without rope."""
    bare = without_rope(settings, layers)
    return [SLIDING if windows_are_on(settings) and number in bare else FULL for number in range(layers)]


def all_but_each(default: int) -> LayerTypes:
    """Gemma: each n-th layer sees everything, those between have a window."""

    def layer_types(settings: Settings, layers: int) -> list[str]:
        period = settings.optional_count("sliding_window_pattern") or default
        return [SLIDING if (number + 1) % period else FULL for number in range(layers)]

    return layer_types


def windows_are_on(settings: Settings) -> bool:
    return settings.flag("use_sliding_window") and settings.given("sliding_window")


def without_rope(settings: Settings, layers: int) -> frozenset[int]:
    """The layers without rotary embedding: those with a 0 in no_rope_layers, else each no_rope_layer_interval-th."""
    flags = settings.raw.get("no_rope_layers")
    if flags is None and settings.given("no_rope_layer_interval"):
        interval = settings.count("no_rope_layer_interval")
        return frozenset(range(interval - 1, layers, interval))
    if flags is None:
        return frozenset()
    if not isinstance(flags, list) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise settings.refuse("no_rope_layers", f"at least {layers} of 0 and 1")
    return frozenset(number for number in range(layers) if not flags[number])


class Family(Struct, frozen=True, kw_only=True):
    """What a family's name decides.

    `keys` are read in config.json beside the common ones. `defaults` is what an absent key means (null is something
    else). `ignored` are keys that may be there with this value only, at which they change nothing.
    """

    keys: frozenset[str] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    ignored: dict[str, Any] = field(default_factory=dict[str, Any])
    layer_types: LayerTypes = every_layer  # where config.json has none
    fixed_layer_types: bool = False  # config.json may have them, but nothing else than what follows without
    qkv_bias: bool = False  # q, k and v are biased, and the output is not, whatever attention_bias says
    qk_norm: Literal["", "head", "projection"] = ""  # q and k are normalised: each head, or all heads together
    pre_norm: bool = True  # attention and MLP get normalised input
    post_norm: bool = False  # what they give is normalised before it is added
    unit_offset: bool = False  # norm weights are stored less 1
    scaled_embedding: bool = False  # embeddings times the root of the hidden size, rounded to the weights' dtype
    activation_key: str = "hidden_act"
    fused: bool = False  # q, k and v are one tensor in the file, and gate and up another
    local_rope: bool = False  # windowed layers have a rope of their own
    rope_aliases: dict[str, str] = field(default_factory=dict[str, str])
    scaled_limit: bool = False  # max_position_embeddings has the rope's factor in it


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


WINDOW_SWITCHES = _keys("max_window_layers sliding_window use_sliding_window")
QWEN = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
MISTRAL = Family(keys=_keys("sliding_window"), defaults={"num_key_value_heads": 8, "sliding_window": 4096})
GEMMA_KEYS = _keys(
    "attention_bias final_logit_softcapping hidden_activation query_pre_attn_scalar sliding_window "
    "sliding_window_pattern"
)
GEMMA = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(keys=_keys("attention_bias mlp_bias")),
    "mistral": MISTRAL,
    "ministral": MISTRAL,
    "qwen2": Family(
        keys=WINDOW_SWITCHES,
        defaults=QWEN,
        layer_types=upper_layers,
        qkv_bias=True,
    ),
    "qwen3": Family(
        keys=WINDOW_SWITCHES | {"attention_bias"},
        defaults=QWEN | {"head_dim": 128},
        layer_types=upper_layers,
        qk_norm="head",
    ),
    "smollm3": Family(
        keys=WINDOW_SWITCHES | _keys("attention_bias mlp_bias no_rope_layers no_rope_layer_interval"),
        defaults={
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        layer_types=unrotated_layers,
    ),
    "granite": Family(
        keys=_keys(
            "attention_bias mlp_bias attention_multiplier embedding_multiplier logits_scaling residual_multiplier"
        ),
        defaults={"attention_multiplier": 1.0},
    ),
    "phi3": Family(
        keys=_keys("partial_rotary_factor sliding_window"),
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        ignored={"full_attn_mod": 1, "interpolate_factor": 1},
        fixed_layer_types=True,
        fused=True,
        rope_aliases={"su": "longrope", "yarn": "longrope"},  # what its first checkpoints call it
    ),
    "olmo2": Family(
        keys=_keys("attention_bias"),
        defaults={"rms_norm_eps": 1e-5},
        qk_norm="projection",
        pre_norm=False,
        post_norm=True,
    ),
    "gemma2": Family(
        keys=GEMMA_KEYS | {"attn_logit_softcapping"},
        defaults=GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ignored={"sliding_window_size": 4096},
        layer_types=all_but_each(2),
        post_norm=True,
        unit_offset=True,
        scaled_embedding=True,
        activation_key="hidden_activation",
    ),
    "gemma3_text": Family(
        keys=GEMMA_KEYS | {"rope_local_base_freq"},
        defaults=GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        layer_types=all_but_each(6),
        qk_norm="head",
        post_norm=True,
        unit_offset=True,
        scaled_embedding=True,
        activation_key="hidden_activation",
        local_rope=True,
        scaled_limit=True,
    ),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
