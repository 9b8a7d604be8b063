"""All layers of a decoder in few launches: ten a layer instead of some thirty, each of which costs a graph about 2 us.

Norms come with the addition before them, and what stands between q, k, v's product and attention is one kernel, which
rounds once instead of after each step of it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.layers import Layer, LayerKind
from kernels.resident import ResidentBatch

Turn = tuple[Tensor, Tensor]  # cos and sin [T, 1, head_dim]


class Operations(Protocol):
    """What is asked of the backend."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, hidden: Tensor, more: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...

    def norm_rope_store(
        self,
        qkv: Tensor,
        kv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        turn: tuple[Tensor, Tensor, Tensor] | None,
        places: tuple[Tensor, Tensor],
        eps: float,
    ) -> Tensor: ...

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        batch: AttentionBatch | ResidentBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...


class TritonLayers:
    """See `kernels.layers.Layers`."""

    def __init__(self, operations: Operations, layers: Sequence[Layer], kind: LayerKind) -> None:
        self._do, self._layers, self._kind = operations, list(layers), kind
        self._gate = operations.gelu_mul if kind.gelu else operations.silu_mul
        # What follows a layer's MLP is the next one's first norm.
        self._following = [*(layer.input_norm for layer in self._layers[1:]), None]

    @staticmethod
    def serve(layers: Sequence[Layer], kind: LayerKind) -> bool:
        """Norms before attention and MLP and not after them, heads normalised one by one if at all, plain additions."""
        return kind.multiplier == 1.0 and all(
            layer.input_norm is not None
            and layer.mlp_norm is not None
            and layer.post_attention_norm is None
            and layer.post_mlp_norm is None
            and all(norm is None or len(norm) == kind.head_dim for norm in (layer.q_norm, layer.k_norm))
            and (layer.q_norm is None) == (layer.k_norm is None)
            for layer in layers
        )

    def __call__(
        self,
        hidden: Tensor,
        caches: Sequence[Tensor],
        turns: Sequence[Turn],
        blocks: Tensor,
        offsets: Tensor,
        batch: AttentionBatch | ResidentBatch,
    ) -> None:
        do, eps, first = self._do, self._kind.eps, self._layers[0].input_norm
        assert first is not None
        numbers = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)  # turns are by token
        normed = do.rms_norm(hidden, first, eps)
        for layer, kv, following in zip(self._layers, caches, self._following, strict=True):
            assert layer.mlp_norm is not None
            turn = None if layer.rope is None else (*turns[layer.rope], numbers)
            attended = self._attend(layer, normed, kv, turn, (blocks, offsets), batch)
            normed = do.add_rms_norm(hidden, layer.output(attended), layer.mlp_norm, eps)
            more = layer.down(self._gate(layer.gate_up(normed)))
            if following is None:
                hidden.add_(more)
            else:
                normed = do.add_rms_norm(hidden, more, following, eps)

    def _attend(
        self,
        layer: Layer,
        normed: Tensor,
        kv: Tensor,
        turn: tuple[Tensor, Tensor, Tensor] | None,
        places: tuple[Tensor, Tensor],
        batch: AttentionBatch | ResidentBatch,
    ) -> Tensor:
        kind = self._kind
        heads = layer.qkv(normed).view(len(normed), -1, kind.head_dim)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        queries = self._do.norm_rope_store(heads, kv, norms, turn, places, kind.eps)
        return self._do.attention(queries, kv, batch, kind.scale, layer.window, kind.softcap).flatten(1)
