"""The decoder family, by configuration flags: embed, layers of attention and gated MLP, norm, head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers import load_layer
from engine.modelconfig import ModelConfig
from engine.rope import Rotation, Turn
from engine.weights import Loader
from kernels import AttentionBatch, Backend, Embedding, Layer, LayerKind, Layers, Linear, ResidentBatch

HEAD = "lm_head.weight"


@dataclass(slots=True)
class Inputs:
    """One step's tokens on the device. Token t sits at positions[t]; its KV goes to (blocks[t], offsets[t]).

    `rows[t]` is the row of its sequence. int64 all, but that `rows` may be int32.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    blocks: Tensor
    offsets: Tensor
    attention: AttentionBatch | ResidentBatch


class Decoder:
    """A decoder-only transformer over a paged KV cache. Holds parameters, and what a row's rope depends on."""

    def __init__(
        self, config: ModelConfig, loader: Loader, backend: Backend, max_positions: int, max_rows: int
    ) -> None:
        self.config = config
        self._backend = backend
        self._embed, tied_head = self._load_embedding(loader)
        self._layers = [load_layer(config, loader, backend, number) for number in range(config.layers)]
        self._fused = self._fuse()
        norm = loader.tensor("model.norm.weight", config.hidden_size)
        self._norm = norm.float() + 1 if config.unit_offset else norm
        self._head = tied_head or backend.prepare_vocabulary(self._load_vocabulary(loader, HEAD))[1]
        self._rotations = [
            Rotation(rope, config.head_dim, max_positions, max_rows, norm.device) for rope in config.ropes
        ]
        self._multiplier = config.embedding_multiplier
        if config.rounds_multiplier:
            self._multiplier = torch.tensor(self._multiplier, dtype=norm.dtype).item()

    def open(self, row: int, length: int) -> None:
        """A sequence that may grow to `length` tokens takes a row."""
        for rotation in self._rotations:
            rotation.open(row, length)

    def forward(self, inputs: Inputs, cache: list[Tensor]) -> Tensor:
        """Hidden states [T, hidden] after the last layer, not yet normalised; writes the step's KV into `cache`."""
        hidden = self._embed(inputs.ids)
        if self._multiplier != 1.0:
            hidden = hidden * self._multiplier
        turns = [rotation.at(inputs.positions, inputs.rows) for rotation in self._rotations]
        if self._fused is not None:
            self._fused(hidden, cache, turns, inputs.blocks, inputs.offsets, inputs.attention)
            return hidden
        for layer, kv in zip(self._layers, cache, strict=True):
            turn = None if layer.rope is None else turns[layer.rope]
            hidden = self._add(hidden, self._attend(layer, hidden, kv, inputs, turn), layer.post_attention_norm)
            hidden = self._add(hidden, self._mlp(layer, hidden), layer.post_mlp_norm)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary], float32, of chosen rows of hidden states."""
        logits = self._head(self._normalise(hidden, self._norm)).float()
        if self.config.logits_divisor != 1.0:
            logits /= self.config.logits_divisor
        if self.config.logits_softcap is not None:
            logits.div_(self.config.logits_softcap).tanh_().mul_(self.config.logits_softcap)
        return logits

    def _fuse(self) -> Layers | None:
        config = self.config
        kind = LayerKind(
            head_dim=config.head_dim,
            eps=config.norm_eps,
            scale=config.scale,
            softcap=config.attention_softcap,
            gelu=config.activation != "silu",
            joint_norms=config.joint_qk_norm,
            multiplier=config.residual_multiplier,
        )
        return self._backend.fuse(self._layers, kind)

    def _attend(self, layer: Layer, hidden: Tensor, kv: Tensor, inputs: Inputs, turn: Turn | None) -> Tensor:
        config, backend = self.config, self._backend
        query_heads, key_heads = config.heads, config.heads + config.kv_heads
        qkv = layer.qkv(self._normalise(hidden, layer.input_norm))
        heads = qkv.view(len(qkv), config.heads + 2 * config.kv_heads, config.head_dim)
        query = self._normalise_heads(heads[:, :query_heads], layer.q_norm)
        key = self._normalise_heads(heads[:, query_heads:key_heads], layer.k_norm)
        if turn is not None:
            query, key = backend.rope(query, *turn), backend.rope(key, *turn)
        backend.store_kv(kv, torch.stack((key, heads[:, key_heads:]), 1), inputs.blocks, inputs.offsets)
        attended = backend.attention(query, kv, inputs.attention, config.scale, layer.window, config.attention_softcap)
        return layer.output(attended.flatten(1))

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate_up = layer.gate_up(self._normalise(hidden, layer.mlp_norm))
        gated = self._backend.silu_mul(gate_up) if self.config.activation == "silu" else self._backend.gelu_mul(gate_up)
        return layer.down(gated)

    def _add(self, hidden: Tensor, more: Tensor, norm: Tensor | None) -> Tensor:
        more = self._normalise(more, norm)
        return hidden + (more if self.config.residual_multiplier == 1.0 else more * self.config.residual_multiplier)

    def _normalise(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        return hidden if weight is None else self._backend.rms_norm(hidden, weight, self.config.norm_eps)

    def _normalise_heads(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        """Normalise heads [T, heads, D] one by one, or, where the weight is as wide as all of them, together."""
        if weight is None or len(weight) == heads.shape[-1]:
            return self._normalise(heads, weight)
        return self._normalise(heads.flatten(1), weight).view_as(heads)

    def _load_embedding(self, loader: Loader) -> tuple[Embedding, Linear | None]:
        """The embedding and, where it is tied to it, the head."""
        weight = self._load_vocabulary(loader, "model.embed_tokens.weight")
        if not self.config.tied:
            return self._backend.prepare_embedding(weight), None
        if loader.has(HEAD):
            loader.drop_tied(HEAD, weight)
        return self._backend.prepare_vocabulary(weight)

    def _load_vocabulary(self, loader: Loader, name: str) -> Tensor:
        return loader.tensor(name, self.config.vocab_size, self.config.hidden_size)
