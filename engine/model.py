"""The decoder family, by configuration flags: embed, layers of attention and gated MLP, norm, head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.modelconfig import ModelConfig
from engine.rope import rope_tables
from engine.weights import Loader
from kernels import AttentionBatch, Backend


@dataclass(slots=True)
class Layer:
    """The parameters of one layer; q, k and v, and gate and up, are stacked so that each is one product."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(slots=True)
class Inputs:
    """One step's tokens on the device. Token t sits at positions[t]; its KV goes to (blocks[t], offsets[t])."""

    ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    attention: AttentionBatch


class Decoder:
    """A decoder-only transformer over a paged KV cache. Holds parameters, no state."""

    def __init__(self, config: ModelConfig, loader: Loader, backend: Backend, max_positions: int) -> None:
        self.config = config
        self._backend = backend
        self._embedding = loader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [load_layer(config, loader, f"model.layers.{index}.") for index in range(config.layers)]
        self._norm = loader.tensor("model.norm.weight", config.hidden_size)
        self._head = self._load_head(loader)
        self._cos, self._sin = rope_tables(config.rope, config.head_dim, max_positions, self._embedding.device)
        self._scale = config.head_dim**-0.5

    def forward(self, inputs: Inputs, cache: list[Tensor]) -> Tensor:
        """Hidden states [T, hidden] after the last layer, not yet normalised; writes the step's KV into `cache`."""
        hidden = self._embedding[inputs.ids]
        cos, sin = self._cos[inputs.positions], self._sin[inputs.positions]
        for layer, kv in zip(self._layers, cache, strict=True):
            hidden = hidden + self._attend(layer, hidden, kv, inputs, cos, sin)
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary], float32, of chosen rows of hidden states."""
        normed = self._backend.rms_norm(hidden, self._norm, self.config.norm_eps)
        return self._backend.linear(normed, self._head).float()

    def _attend(self, layer: Layer, hidden: Tensor, kv: Tensor, inputs: Inputs, cos: Tensor, sin: Tensor) -> Tensor:
        config, backend = self.config, self._backend
        normed = backend.rms_norm(hidden, layer.input_norm, config.norm_eps)
        qkv = backend.linear(normed, layer.qkv, layer.qkv_bias)
        heads = qkv.view(len(qkv), config.heads + 2 * config.kv_heads, config.head_dim)
        query, key = heads[:, : config.heads], heads[:, config.heads : config.heads + config.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            query = backend.rms_norm(query, layer.q_norm, config.norm_eps)
            key = backend.rms_norm(key, layer.k_norm, config.norm_eps)
        query, key = backend.rope(query, cos, sin), backend.rope(key, cos, sin)
        new = torch.stack((key, heads[:, config.heads + config.kv_heads :]), 1)
        backend.store_kv(kv, new, inputs.blocks, inputs.offsets)
        attended = backend.attention(query, kv, inputs.attention, self._scale)
        return backend.linear(attended.flatten(1), layer.output, layer.output_bias)

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        normed = self._backend.rms_norm(hidden, layer.mlp_norm, self.config.norm_eps)
        gated = self._backend.silu_mul(self._backend.linear(normed, layer.gate_up, layer.gate_up_bias))
        return self._backend.linear(gated, layer.down, layer.down_bias)

    def _load_head(self, loader: Loader) -> Tensor:
        name = "lm_head.weight"
        if not self.config.tied:
            return loader.tensor(name, self.config.vocab_size, self.config.hidden_size)
        if loader.has(name):
            loader.drop_tied(name, self._embedding)
        return self._embedding

    def tensors(self) -> list[Tensor]:
        """Every distinct parameter, for sizes and digests."""
        layers = [getattr(layer, name) for layer in self._layers for name in Layer.__dataclass_fields__]
        heads = [] if self._head is self._embedding else [self._head]
        return [self._embedding, self._norm, *heads, *(tensor for tensor in layers if tensor is not None)]


def load_layer(config: ModelConfig, loader: Loader, prefix: str) -> Layer:
    """Read one layer. Raises ModelError for a tensor that is missing or has another shape."""
    hidden, width, inner = config.hidden_size, config.head_dim, config.intermediate_size
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    q_rows, kv_rows = config.heads * width, config.kv_heads * width
    qkv = [(attention + "q_proj", q_rows), (attention + "k_proj", kv_rows), (attention + "v_proj", kv_rows)]
    output, down = [(attention + "o_proj", hidden)], [(mlp + "down_proj", hidden)]
    gate_up = [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)]

    def weights(parts: list[tuple[str, int]], columns: int) -> Tensor:
        return loader.stacked([(name + ".weight", rows) for name, rows in parts], columns)

    def biases(parts: list[tuple[str, int]], *, present: bool) -> Tensor | None:
        return loader.stacked([(name + ".bias", rows) for name, rows in parts]) if present else None

    return Layer(
        input_norm=loader.tensor(prefix + "input_layernorm.weight", hidden),
        qkv=weights(qkv, hidden),
        qkv_bias=biases(qkv, present=config.qkv_bias),
        q_norm=loader.tensor(attention + "q_norm.weight", width) if config.qk_norm else None,
        k_norm=loader.tensor(attention + "k_norm.weight", width) if config.qk_norm else None,
        output=weights(output, q_rows),
        output_bias=biases(output, present=config.output_bias),
        mlp_norm=loader.tensor(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=weights(gate_up, hidden),
        gate_up_bias=biases(gate_up, present=config.mlp_bias),
        down=weights(down, inner),
        down_bias=biases(down, present=config.mlp_bias),
    )
