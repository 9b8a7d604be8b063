# type: ignore  (the language of kernels is not Python's: types are those of the launchers)
"""Kernels over rows of hidden states: RMSNorm, with the residual's addition or without, and the gates of an MLP.

A program takes a row (or, of a gate, 1,024 numbers of one): nothing depends on the other rows, so there is one
variant.

Bytes and FLOPs, H200 at 4.3 TB/s, bfloat16, T tokens: `add_rms_norm` reads two rows and the weight and writes two
rows, 8 * hidden a token, about 8 FLOPs a number: 128 tokens of hidden 4,096 are 4.2 MB and 1.0 us. `gate` reads 2 * I
numbers and writes I, 6 * I bytes and about 8 * I FLOPs a token: 128 tokens of I 14,336 are 11 MB and 2.6 us. Below
that a launch is the bound.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, weight, y, x_token, x_head, y_token, y_head, eps, width: tl.constexpr):
    """Grid (tokens, heads): y = x over the root of its mean square, times the weight. x, y [tokens, heads, width]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, triton.next_power_of_2(width))
    row = tl.load(x + token * x_token + head * x_head + i, mask=i < width, other=0.0).to(tl.float32)
    normed = normalise(row, tl.load(weight + i, mask=i < width, other=0.0), eps, width)
    tl.store(y + token * y_token + head * y_head + i, normed.to(y.dtype.element_ty), mask=i < width)


@triton.jit
def add_rms_norm(hidden, more, weight, y, hidden_row, more_row, y_row, eps, width: tl.constexpr):
    """Grid (tokens): hidden += more, in place and rounded to its dtype; y = its norm. All [tokens, width]."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(width))
    at = hidden + token * hidden_row + i
    row = tl.load(at, mask=i < width, other=0.0).to(tl.float32)
    row = (row + tl.load(more + token * more_row + i, mask=i < width, other=0.0)).to(hidden.dtype.element_ty)
    tl.store(at, row, mask=i < width)
    normed = normalise(row.to(tl.float32), tl.load(weight + i, mask=i < width, other=0.0), eps, width)
    tl.store(y + token * y_row + i, normed.to(y.dtype.element_ty), mask=i < width)


@triton.jit
def normalise(row, weight, eps, width: tl.constexpr):
    return row * tl.rsqrt(tl.sum(row * row, 0) / width + eps) * weight.to(tl.float32)


@triton.jit
def gate(gate_up, y, gate_up_row, y_row, inner, block: tl.constexpr, gelu: tl.constexpr):
    """Grid (tokens, any): y [tokens, inner] = act(gate) * up of gate_up [tokens, 2 inner]; silu, or gelu by tanh."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block + tl.arange(0, block)
    at = gate_up + token * gate_up_row + i
    x = tl.load(at, mask=i < inner, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=i < inner, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)); the numbers are those of kernels.reference.
    slope = 1.5957691216057308 * (x + 0.044715 * x * x * x) if gelu else x
    tl.store(y + token * y_row + i, (x / (1.0 + tl.exp(-slope)) * up).to(y.dtype.element_ty), mask=i < inner)
