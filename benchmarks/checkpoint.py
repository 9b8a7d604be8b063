"""The same bfloat16 weights for both sides: transformers reads a checkpoint that our own loader has read."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from engine.modelconfig import ModelConfig
from engine.weights import open_checkpoint


def huggingface_directory(model: Path, scratch: Path) -> Path:
    """`model` itself when it is a Hugging Face directory, else a copy of the GGUF file as one, in `scratch`."""
    if model.is_dir():
        return model
    logging.disable_progress_bar()
    with open_checkpoint(str(model)) as (config, source, _):
        state = {name: source.read(name).to(torch.bfloat16) for name in source.names()}
        twin = AutoModelForCausalLM.from_config(_hf_config(config), dtype=torch.bfloat16)
    if config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    twin.load_state_dict(state)
    twin.save_pretrained(scratch)
    return scratch


def _hf_config(config: ModelConfig) -> PreTrainedConfig:
    return AutoConfig.for_model(
        config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope.theta,
        tie_word_embeddings=config.tied,
        attention_bias=config.output_bias,
    )
