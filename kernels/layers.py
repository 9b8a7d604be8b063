"""What a backend needs to know of a decoder's layers to compute them in one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.linear import Linear
from kernels.resident import ResidentBatch


@dataclass(slots=True)
class Layer:
    """The parameters of one decoder layer; q, k and v, and gate and up, are stacked so that each is one product.

    `window` is in positions. `rope` is an index into the step's ropes. What a family does not have is None.
    """

    window: int | None
    rope: int | None
    input_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Linear
    down: Linear
    post_mlp_norm: Tensor | None


class LayerKind(NamedTuple):
    """What all layers of a decoder have in common."""

    head_dim: int
    eps: float  # of the norms
    scale: float  # of the scores
    softcap: float | None
    gelu: bool  # else SiLU
    joint_norms: bool  # q and k: all heads of a token together, else each
    multiplier: float  # of what is added to hidden states


class Layers(Protocol):
    """All layers in one call: writes the step's KV to the layers' caches, changes `hidden` [T, hidden] in place.

    `turns` are cos and sin [T, 1, head_dim] of each rope; token t's KV goes to (blocks[t], offsets[t]).
    """

    def __call__(
        self,
        hidden: Tensor,
        caches: Sequence[Tensor],
        turns: Sequence[tuple[Tensor, Tensor]],
        blocks: Tensor,
        offsets: Tensor,
        batch: AttentionBatch | ResidentBatch,
    ) -> None: ...
