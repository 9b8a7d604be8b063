"""The same model in each peer's own form: a Hugging Face directory, GGUF files, an OpenVINO directory."""

import subprocess
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from benchmarks.peers.process import PEERS

QWEN3_06B = Qwen3Config(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-6, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, eos_token_id=1, bos_token_id=0, dtype="bfloat16",
)  # fmt: skip
QUANTISATIONS = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}


def random_qwen3(directory: Path) -> Path:
    """Qwen3-0.6B's shape with random weights in bfloat16: speed does not depend on what they are."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(QWEN3_06B, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    return directory


def _save_tokenizer(directory: Path) -> None:
    """Bytes and two control tokens: peers want one to load, no job needs it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|start|>", "<|end|>")])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>").save_pretrained(
        directory
    )


def write_gguf(model: Path, path: Path, quantisation: str) -> Path:
    """A GGUF file of a Hugging Face directory (Qwen3 or Llama); matrices quantised, norms in float32, no vocabulary."""
    config = AutoConfig.from_pretrained(model)
    architecture = {"qwen3": gguf.MODEL_ARCH.QWEN3, "llama": gguf.MODEL_ARCH.LLAMA}[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_metadata(writer, config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as source:
            for name in source.keys():  # noqa: SIM118 (no mapping, though it looks like one)
                tensor = _permuted(name, source.get_tensor(name).float(), config).numpy()
                target = names.get_name(name, (".weight",))
                if target is not None and not (config.tie_word_embeddings and name == "lm_head.weight"):
                    _write_tensor(writer, target, tensor, QUANTISATIONS[quantisation])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _permuted(name: str, tensor: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """GGUF's Llama pairs neighbouring dimensions for rope, where Hugging Face's pairs the halves."""
    if config.model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, quantisation: gguf.GGMLQuantizationType
) -> None:
    if tensor.ndim == 1:
        writer.add_tensor(name, tensor)
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor, quantisation), raw_dtype=quantisation)


def write_openvino(model: Path, directory: Path, weights: str) -> Path:
    """OpenVINO's own form, by its exporter in the environment `export`; `weights`: fp16, int8 or int4."""
    command = [PEERS / "export" / "bin" / "optimum-cli", "export", "openvino", "--model", model]
    command += ["--task", "text-generation-with-past", "--weight-format", weights, directory]
    subprocess.run(command, check=True, capture_output=True)
    return directory
