# type: ignore  (the language of kernels is not Python's: types are those of the launchers)
"""Matrix products of at most 16 rows, with what stands before and after them: one pass over the weights, one launch.

Bytes, H200 at 4.3 TB/s: the weights, N * K * itemsize (twice that where gated): 34 MB and 7.8 us for K = N = 4,096,
235 MB and 55 us for gate and up of Llama-3.1-8B. FLOPs: 2 * 16 * N * K with the padding, 16 a byte of bfloat16: a
tenth of what would bound it. No split of K: a row's bits depend on itself alone, for any number of rows up to 16.
"""

import triton
import triton.language as tl


@triton.jit
def skinny_linear(
    x, norm, weight, residual, y, rows, outputs, x_row, weight_row, residual_row, y_row, eps,
    inner: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    normed: tl.constexpr, gated: tl.constexpr, added: tl.constexpr,
):  # fmt: skip
    """Grid (outputs / block_n): y [rows, outputs] = f(x [rows, inner] @ weight.T), weight [outputs, inner].

    normed: x is RMS-normalised first, times norm [inner]; its rows' scales are applied to the sums, with which they
    commute. gated: weight is [2 outputs, inner] and y = silu(gate) * up. added: plus residual [rows, outputs].
    """
    m, n = tl.arange(0, 16), tl.program_id(0) * block_n + tl.arange(0, block_n)
    there = (m < rows)[:, None] & (n < outputs)[None, :]
    acc, up = tl.zeros([16, block_n], tl.float32), tl.zeros([16, block_n], tl.float32)
    squares = tl.zeros([16], tl.float32)
    columns = weight + n.to(tl.int64)[:, None] * weight_row
    for start in range(0, inner, block_k):
        k = start + tl.arange(0, block_k)
        w_mask, x_mask = (n < outputs)[:, None] & (k < inner)[None, :], (m < rows)[:, None] & (k < inner)[None, :]
        w = tl.load(columns + k[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        a = tl.load(x + m[:, None] * x_row + k[None, :], mask=x_mask, other=0.0)
        if normed:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            a = (wide * tl.load(norm + k, mask=k < inner, other=0.0).to(tl.float32)[None, :]).to(a.dtype)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        if gated:
            other = columns + outputs * weight_row.to(tl.int64) + k[None, :]
            w = tl.load(other, mask=w_mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(a, tl.trans(w), up, input_precision="ieee")
    if normed:
        scale = tl.rsqrt(squares / inner + eps)[:, None]
        acc, up = acc * scale, up * scale
    if gated:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if added:
        acc += tl.load(residual + m[:, None] * residual_row + n[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(y + m[:, None] * y_row + n[None, :], acc.to(y.dtype.element_ty), mask=there)
