"""The operations behind the door, on the C++ kernels, where a row's bits never depend on the other rows.

Everything the kernels do not check is checked here: dtypes, layouts, sizes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, Heads
from kernels.backend import Embedding, TorchBackend
from kernels.cpu.attention import paged_attention
from kernels.cpu.layers import FusedLayers
from kernels.cpu.library import Library
from kernels.cpu.linear import PER_UNIT, PackedLinear, QuantizedLinear
from kernels.cpu.memory import Arena, make_real
from kernels.layers import Layer, LayerKind
from kernels.linear import Linear
from kernels.resident import ResidentBatch
from kernels.top import BLOCK

SMALL_POOL = 64 << 20  # bytes of KV memory that are not worth a thread


class CpuBackend(TorchBackend):
    """bfloat16 and float32 on a CPU."""

    def __init__(
        self,
        library: Library,
        *,
        deterministic: bool,
        threads: int,
        dtype: torch.dtype | None = None,
        bits: int | None = None,
    ) -> None:
        """`bits`: keep weights in 8 or 4 bits; they come as float32 then, and `dtype` is that of rows."""
        super().__init__(
            deterministic=deterministic, name=f"cpu-{library.level.name}" + (f"-int{bits}" if bits else "")
        )
        self.library, self._dtype, self._bits = library, dtype, bits
        self._rounded_bytes = 0
        self._arena = Arena(library.advise_huge)
        library.set_threads(threads)

    @property
    def numerics(self) -> str:
        return f"{self.name}-{self.library.numerics}"

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return self._pack(weight, bias, self._bits)

    @property
    def rounded_bytes(self) -> int:
        return self._rounded_bytes

    def prepare_embedding(self, weight: Tensor) -> Embedding:
        if self._bits is None:
            return super().prepare_embedding(weight)
        weight = weight.to(self._dtype)
        self._rounded_bytes += weight.nbytes
        return super().prepare_embedding(weight)

    def prepare_vocabulary(self, weight: Tensor) -> tuple[Embedding, Linear]:
        """Never in fewer than 8 bits: what every token goes through twice costs more quality than it saves."""
        packed = self._pack(weight, None, 8 if self._bits else None)
        return packed.rows, packed.widened

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        rows, columns = logits.shape
        maxima, ids = torch.empty(rows, -(-columns // BLOCK)), torch.empty(rows, dtype=torch.int64)
        self.library.best(logits.data_ptr(), logits.stride(0), rows, columns, maxima.data_ptr(), ids.data_ptr())
        return maxima, ids

    def _pack(self, weight: Tensor, bias: Tensor | None, bits: int | None) -> PackedLinear:
        dtype = self._dtype or weight.dtype
        if bits is None:
            return PackedLinear(self.library, self._arena, weight, bias, dtype)
        linear = QuantizedLinear(self.library, self._arena, weight, bias, dtype, bits)
        self._rounded_bytes += linear.packed.nbytes
        return linear

    def settle(self, cache: Sequence[Tensor]) -> None:
        if sum(layer.nbytes for layer in cache) < SMALL_POOL:
            return
        for layer in cache:
            self.library.advise_huge(layer.data_ptr(), layer.nbytes)
        make_real(cache, self.library.populate)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert weight.shape == x.shape[-1:]
        weight = weight.float().contiguous()
        x, (tokens, stride, heads, width) = _heads(x)
        y = torch.empty(x.shape, dtype=x.dtype)
        self.library.rms_norm(
            _half(x), x.data_ptr(), tokens, stride, heads, width, weight.data_ptr(), eps, y.data_ptr()
        )
        return y

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, (tokens, stride, heads, width) = _heads(x)
        assert cos.shape == sin.shape == (tokens, 1, width)
        assert cos.dtype == sin.dtype == torch.float32
        cos, sin, y = cos.contiguous(), sin.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        self.library.rope(
            _half(x), x.data_ptr(), tokens, stride, heads, width, cos.data_ptr(), sin.data_ptr(), y.data_ptr()
        )
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, with_gelu=0)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, with_gelu=1)

    def _gate(self, gate_up: Tensor, with_gelu: int) -> Tensor:
        rows, doubled = gate_up.shape
        gate_up = gate_up.contiguous()
        y = torch.empty(rows, doubled // 2, dtype=gate_up.dtype)
        self.library.gate(_half(gate_up), with_gelu, gate_up.data_ptr(), rows, doubled // 2, y.data_ptr())
        return y

    def store_kv(self, kv: Tensor, new: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        _, pool, heads, block_size, width = kv.shape
        assert kv.is_contiguous()
        assert new.dtype == kv.dtype
        assert blocks.dtype == offsets.dtype == torch.int64
        assert new.shape == (len(blocks), 2, heads, width)
        assert len(offsets) == len(blocks)
        new, blocks, offsets = new.contiguous(), blocks.contiguous(), offsets.contiguous()
        shape = torch.tensor((pool, heads, block_size, width))
        self.library.store_kv(
            _half(kv), kv.data_ptr(), new.data_ptr(), len(blocks), blocks.data_ptr(), offsets.data_ptr(),
            shape.data_ptr(),
        )  # fmt: skip

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        batch: AttentionBatch | ResidentBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        assert isinstance(batch, AttentionBatch), "`resident` is None"
        return paged_attention(self.library, q, kv, batch, scale, window, softcap)

    def resident(self, device: torch.device, heads: Heads, width: int) -> None:
        """The host knows all lengths anyway, and a call costs it little."""

    def fuse(self, layers: Sequence[Layer], kind: LayerKind) -> FusedLayers | None:
        return FusedLayers.of(self.library, layers, kind)


def _half(x: Tensor) -> int:
    """How the kernels are told a dtype."""
    assert x.dtype in PER_UNIT, x.dtype
    return int(x.dtype == torch.bfloat16)


def _heads(x: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """x [tokens, (heads,) width] with heads side by side, and (tokens, stride between tokens, heads, width)."""
    if x.dim() == 2:
        x = x if x.stride(1) == 1 else x.contiguous()
        return x, (x.shape[0], x.stride(0), 1, x.shape[1])
    assert x.dim() == 3, x.shape
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        x = x.contiguous()
    return x, (x.shape[0], x.stride(0), x.shape[1], x.shape[2])
