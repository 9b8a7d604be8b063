"""The operations behind the door, and their plain-torch implementation for any device."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import AttentionBatch, Heads, paged_attention
from kernels.layers import Layer, LayerKind, Layers
from kernels.linear import Linear, prepare_linear
from kernels.plain_resident import PlainResident
from kernels.reference import GELU_CUBIC, GELU_SCALE
from kernels.resident import Resident, ResidentBatch
from kernels.top import best

Embedding = Callable[[Tensor], Tensor]  # ids [T] -> [T, hidden]


class Backend(Protocol):
    """What a forward pass needs. The meaning of each operation stands in kernels/reference.py.

    `name` tells people who computes; `numerics` is the part of it that decides the bits of a result.
    """

    @property
    def name(self) -> str: ...

    @property
    def numerics(self) -> str: ...

    @property
    def rounded_bytes(self) -> int:
        """Bytes of the matrices that came in float32, to be kept in fewer bits."""
        ...

    def settle(self, cache: Sequence[Tensor]) -> None:
        """The layers' KV memory [2, blocks, kv_heads, block_size, D] is there, and will be written soon."""
        ...

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    def prepare_embedding(self, weight: Tensor) -> Embedding: ...

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As kernels.top.best, of logits [B, vocabulary] in float32; for a row with NaN the column may be any."""
        ...

    def prepare_vocabulary(self, weight: Tensor) -> tuple[Embedding, Linear]:
        """The rows of a head's weight [vocabulary, hidden], for embeddings tied to it, and the head: of one copy.

        The head's results may come in float32.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...

    def store_kv(self, kv: Tensor, new: Tensor, blocks: Tensor, offsets: Tensor) -> None: ...

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        batch: AttentionBatch | ResidentBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...

    def fuse(self, layers: Sequence[Layer], kind: LayerKind) -> Layers | None:
        """The layers as one call, which then serves all steps; None where there is none for them.

        Its bits are those of the operations above, but for roundings that it leaves out.
        """
        ...

    def resident(self, device: torch.device, heads: Heads, width: int) -> Resident | None:
        """What prepares steps from the device's own state, so that graphs can hold them; None where nothing does.

        Attention then takes a ResidentBatch, for heads of this width.
        """
        ...


class TorchBackend:
    """Stock torch operations. With `deterministic`, a row's bits never depend on the other rows of the batch."""

    def __init__(self, *, deterministic: bool, name: str = "torch") -> None:
        self._deterministic, self.name = deterministic, name

    @property
    def numerics(self) -> str:
        return "torch"

    @property
    def rounded_bytes(self) -> int:
        return 0

    def settle(self, cache: Sequence[Tensor]) -> None:
        pass

    def fuse(self, layers: Sequence[Layer], kind: LayerKind) -> Layers | None:
        return None

    def resident(self, device: torch.device, heads: Heads, width: int) -> Resident | None:
        return None if device.type == "cuda" else PlainResident()

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return prepare_linear(weight, bias, deterministic=self._deterministic)

    def prepare_embedding(self, weight: Tensor) -> Embedding:
        return lambda ids: weight[ids]

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return best(logits)

    def prepare_vocabulary(self, weight: Tensor) -> tuple[Embedding, Linear]:
        return self.prepare_embedding(weight), self.prepare_linear(weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype == x.dtype:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As the reference; cos and sin are [T, 1, D]: doubled, the first half of sin negated."""
        rotated = x.roll(x.shape[-1] // 2, -1)
        return (x * cos).add_(rotated * sin).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if not self._deterministic:
            return F.silu(gate) * up
        # exp and single arithmetic operations only: the fused silu rounds differently at the ends of a tensor.
        gate = gate.float()
        return gate.div_(torch.exp(-gate).add_(1.0)).mul_(up).to(gate_up.dtype)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if not self._deterministic:
            return F.gelu(gate, approximate="tanh") * up
        gate = gate.float()
        inner = (gate * gate).mul_(gate).mul_(GELU_CUBIC).add_(gate).mul_(GELU_SCALE)
        # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)).
        return gate.div_(torch.exp(inner.mul_(-2.0)).add_(1.0)).mul_(up).to(gate_up.dtype)

    def store_kv(self, kv: Tensor, new: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        kv[:, blocks, :, offsets] = new

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        batch: AttentionBatch | ResidentBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if isinstance(batch, AttentionBatch):
            return paged_attention(q, kv, batch, scale, window, softcap)
        there = sum(batch.on_host.query_lengths)
        out = torch.full_like(q, torch.nan)  # of nobody: what a kernel leaves there may be anything
        out[:there] = paged_attention(q[:there], kv, batch.on_host, scale, window, softcap)
        return out
