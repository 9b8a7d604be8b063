"""Matrix products with weights that are prepared once: packed where the library can, and row-invariant on request."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.rows import COUNTS, Product, RowCounts, cancelling

WIDE, WIDE_ROWS = 16384, 64  # vocabulary heads are rarely given more rows than this, and are slow to measure with more
Linear = Callable[[Tensor], Tensor]  # x [T, in] -> [T, out] in x's dtype


def prepare_linear(weight: Tensor, bias: Tensor | None, *, deterministic: bool) -> Linear:
    """x -> x @ weight.T + bias for weight [out, in]. The weight may be kept in another layout and not be needed again.

    With `deterministic`, a row's bits do not depend on the other rows of x.
    """
    product = _bind(weight, bias)
    if not deterministic:
        return product
    counts = _row_counts(weight.shape, weight.dtype, weight.device, bias is not None, torch.get_num_threads())
    return lambda x: counts.apply(product, x)


def _bind(weight: Tensor, bias: Tensor | None) -> Product:
    if _packs(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN takes the weight in its own blocked layout: 1.7 x as fast as stock for few rows of bfloat16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def _row_counts(shape: torch.Size, dtype: torch.dtype, device: torch.device, biased: bool, threads: int) -> RowCounts:
    """The row counts that agree with this many threads, measured on a stand-in of the weight's shape."""
    outputs, inner = shape
    rows = WIDE_ROWS if outputs > WIDE else COUNTS[-1]
    x, stand_in = cancelling(rows, outputs, inner, dtype, device)
    bias = torch.zeros(outputs, dtype=dtype, device=device) if biased else None
    return RowCounts.measure(_bind(stand_in, bias), x)
