# pyright: reportMissingImports=false, reportIndexIssue=false
"""Launching products of few rows. Nothing calls them yet: whether they beat the stock ones only a card can tell."""

import torch
from torch import Tensor

from kernels.triton.shapes import skinny_tiles
from kernels.triton.skinny import skinny_linear

MOST_ROWS = 16


def multiply_few(
    x: Tensor,
    weight: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """x [T, inner], T at most 16, times weight [outputs, inner] transposed -> [T, outputs] in x's dtype.

    norm: the weight [inner] and eps of an RMSNorm of x before it. gated: weight is gate and up, one above the other,
    and the result silu(gate) * up. residual [T, outputs]: added to the result before it is rounded.
    """
    rows, inner = x.shape
    assert 1 <= rows <= MOST_ROWS
    assert weight.shape[1] == inner
    assert x.stride(1) == weight.stride(1) == 1
    outputs = weight.shape[0] // (2 if gated else 1)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    scale, eps = norm or (x, 0.0)
    added = y if residual is None else residual
    tiles, options = skinny_tiles(x.element_size(), gated=gated)
    skinny_linear[(-(-outputs // tiles["block_n"]),)](
        x, scale, weight, added, y, rows, outputs, x.stride(0), weight.stride(0), added.stride(0), y.stride(0), eps,
        inner=inner, normed=norm is not None, gated=gated, added=residual is not None, **tiles, **options,
    )  # fmt: skip
    return y
