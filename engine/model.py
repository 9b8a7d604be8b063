"""The decoder family, by configuration flags: embed, layers of attention and gated MLP, norm, head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.modelconfig import ModelConfig
from engine.rope import rope_tables
from engine.weights import Loader
from kernels import AttentionBatch, Backend, Embedding, Linear

HEAD = "lm_head.weight"


@dataclass(slots=True)
class Layer:
    """The parameters of one layer; q, k and v, and gate and up, are stacked so that each is one product."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


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
        self._embed, tied_head = self._load_embedding(loader)
        self._layers = [load_layer(config, loader, backend, f"model.layers.{n}.") for n in range(config.layers)]
        self._norm = loader.tensor("model.norm.weight", config.hidden_size)
        self._head = tied_head or backend.prepare_linear(self._load_vocabulary(loader, HEAD))
        self._cos, self._sin = rope_tables(config.rope, config.head_dim, max_positions, self._norm.device)
        self._scale = config.head_dim**-0.5

    def forward(self, inputs: Inputs, cache: list[Tensor]) -> Tensor:
        """Hidden states [T, hidden] after the last layer, not yet normalised; writes the step's KV into `cache`."""
        hidden = self._embed(inputs.ids)
        cos, sin = self._cos[inputs.positions], self._sin[inputs.positions]
        for layer, kv in zip(self._layers, cache, strict=True):
            hidden = hidden + self._attend(layer, hidden, kv, inputs, cos, sin)
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary], float32, of chosen rows of hidden states."""
        normed = self._backend.rms_norm(hidden, self._norm, self.config.norm_eps)
        return self._head(normed).float()

    def _attend(self, layer: Layer, hidden: Tensor, kv: Tensor, inputs: Inputs, cos: Tensor, sin: Tensor) -> Tensor:
        config, backend = self.config, self._backend
        normed = backend.rms_norm(hidden, layer.input_norm, config.norm_eps)
        qkv = layer.qkv(normed)
        heads = qkv.view(len(qkv), config.heads + 2 * config.kv_heads, config.head_dim)
        query, key = heads[:, : config.heads], heads[:, config.heads : config.heads + config.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            query = backend.rms_norm(query, layer.q_norm, config.norm_eps)
            key = backend.rms_norm(key, layer.k_norm, config.norm_eps)
        query, key = backend.rope(query, cos, sin), backend.rope(key, cos, sin)
        new = torch.stack((key, heads[:, config.heads + config.kv_heads :]), 1)
        backend.store_kv(kv, new, inputs.blocks, inputs.offsets)
        attended = backend.attention(query, kv, inputs.attention, self._scale)
        return layer.output(attended.flatten(1))

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        normed = self._backend.rms_norm(hidden, layer.mlp_norm, self.config.norm_eps)
        return layer.down(self._backend.silu_mul(layer.gate_up(normed)))

    def _load_embedding(self, loader: Loader) -> tuple[Embedding, Linear | None]:
        """The embedding and, where it is tied to it, the head."""
        weight = self._load_vocabulary(loader, "model.embed_tokens.weight")
        if not self.config.tied:
            return lambda ids: weight[ids], None
        if loader.has(HEAD):
            loader.drop_tied(HEAD, weight)
        return self._backend.prepare_tied(weight)

    def _load_vocabulary(self, loader: Loader, name: str) -> Tensor:
        return loader.tensor(name, self.config.vocab_size, self.config.hidden_size)


def load_layer(config: ModelConfig, loader: Loader, backend: Backend, prefix: str) -> Layer:
    """Read one layer. Raises ModelError for a tensor that is missing or has another shape."""
    hidden, width, inner = config.hidden_size, config.head_dim, config.intermediate_size
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    q_rows, kv_rows = config.heads * width, config.kv_heads * width
    qkv = [(attention + "q_proj", q_rows), (attention + "k_proj", kv_rows), (attention + "v_proj", kv_rows)]
    gate_up = [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)]

    def linear(parts: list[tuple[str, int]], columns: int, *, biased: bool) -> Linear:
        weight = loader.stacked([(name + ".weight", rows) for name, rows in parts], columns)
        bias = loader.stacked([(name + ".bias", rows) for name, rows in parts]) if biased else None
        return backend.prepare_linear(weight, bias)

    return Layer(
        input_norm=loader.tensor(prefix + "input_layernorm.weight", hidden),
        qkv=linear(qkv, hidden, biased=config.qkv_bias),
        q_norm=loader.tensor(attention + "q_norm.weight", width) if config.qk_norm else None,
        k_norm=loader.tensor(attention + "k_norm.weight", width) if config.qk_norm else None,
        output=linear([(attention + "o_proj", hidden)], q_rows, biased=config.output_bias),
        mlp_norm=loader.tensor(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=linear(gate_up, hidden, biased=config.mlp_bias),
        down=linear([(mlp + "down_proj", hidden)], inner, biased=config.mlp_bias),
    )
