"""Weights in the kernels' layout: products, and rows read back for embeddings."""

import torch
from torch import Tensor

from kernels.cpu.library import Library
from kernels.cpu.memory import Arena

COLUMNS, GROUP = 32, 32  # outputs of a packed panel, elements that share a scale: as the C++ headers have them
PER_UNIT = {torch.float32: 1, torch.bfloat16: 2}  # the dtypes that there are kernels for, and how many make 4 bytes


class PackedLinear:
    """x [T, in] -> x @ weight.T + bias [T, out], for a weight that is kept in the kernels' layout only."""

    kind = 0  # of gllm_linear's formats

    def __init__(self, library: Library, arena: Arena, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.outputs, self.inner = weight.shape
        self.dtype, self.half = dtype, int(dtype == torch.bfloat16)
        self.library, self.format = library, 2 * self.kind + self.half
        assert weight.is_contiguous()
        assert bias is None or bias.shape == (self.outputs,)
        self.bias = None if bias is None else bias.to(dtype).contiguous()
        self.packed = self._pack(arena, weight)

    def _pack(self, arena: Arena, weight: Tensor) -> Tensor:
        assert weight.dtype == self.dtype, (weight.dtype, self.dtype)
        panels, units = -(-self.outputs // COLUMNS), -(-self.inner // PER_UNIT[self.dtype])
        packed = arena.take(panels * units * COLUMNS)
        self.library.pack(self.half, weight.data_ptr(), self.outputs, self.inner, packed.data_ptr())
        return packed

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, torch.empty(len(x), self.outputs, dtype=self.dtype))

    def widened(self, x: Tensor) -> Tensor:
        """The same numbers in float32: a vocabulary's logits without a pass to convert them."""
        return self._multiply(x, torch.empty(len(x), self.outputs))

    def _multiply(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == self.dtype, (x.dtype, self.dtype)
        assert x.dim() == 2, x.shape
        assert x.shape[1] == self.inner, (x.shape, self.inner)
        x = x if x.stride(1) == 1 else x.contiguous()
        bias = self.bias.data_ptr() if self.bias is not None else None
        self.library.linear(
            self.format, x.data_ptr(), x.stride(0), len(x), self.packed.data_ptr(), self.inner, self.outputs,
            bias, y.data_ptr(), self.outputs, int(y.dtype != self.dtype),
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight [len(ids), in]: the embedding of a model whose head is tied to it."""
        assert ids.dtype == torch.int64
        assert not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < self.outputs, "token id out of range"
        ids, found = ids.contiguous(), torch.empty(len(ids), self.inner, dtype=self.dtype)
        self._unpack(ids, found)
        return found

    def _unpack(self, ids: Tensor, found: Tensor) -> None:
        self.library.unpack_rows(
            self.half, self.packed.data_ptr(), self.inner, ids.data_ptr(), len(ids), found.data_ptr()
        )


class QuantizedLinear(PackedLinear):
    """The same for a float32 weight that is kept in `bits` bits: whole numbers in groups of 32 that share a scale."""

    def __init__(
        self, library: Library, arena: Arena, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, bits: int
    ) -> None:
        self.bits, self.kind = bits, {8: 1, 4: 2}[bits]
        super().__init__(library, arena, weight, bias, dtype)

    def _pack(self, arena: Arena, weight: Tensor) -> Tensor:
        panels, groups = -(-self.outputs // COLUMNS), -(-self.inner // GROUP)
        packed = arena.take(panels * groups * COLUMNS * (GROUP * self.bits // 8 + 2), torch.uint8)
        weight = weight.float()
        self.library.quantize(self.bits, weight.data_ptr(), self.outputs, self.inner, packed.data_ptr())
        return packed

    def _unpack(self, ids: Tensor, found: Tensor) -> None:
        self.library.quantized_rows(
            self.bits, self.half, self.packed.data_ptr(), self.inner, ids.data_ptr(), len(ids), found.data_ptr()
        )
