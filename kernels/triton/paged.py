# type: ignore  (the language of kernels is not Python's: types are those of the launchers)
"""Attention of a tile of query rows over keys of the paged cache: what decode and prefill share, so that they agree.

Scores are kept in units of log 2. All sums that two kernels must round alike are written as explicit multiply-adds,
and the kernels are compiled without contraction of their own (`enable_fp_fusion=False`). A tile of keys that a row
does not see is an exact no-op for it: times 1, plus 0. So a row's bits depend on its position and its keys alone.
"""

import triton
import triton.language as tl


@triton.jit
def entry_of(starts, number, count, most: tl.constexpr):
    """Which of `count` entries holds item `number`, for starts int32 [count + 1]. One load and one sum: no search."""
    i = tl.arange(0, most)
    ends = tl.load(starts + 1 + i, mask=i < count, other=0x7FFFFFFF)
    return tl.sum((ends <= number).to(tl.int32), 0)


@triton.jit
def bend(scores, softcap):
    """softcap * tanh(scores / softcap). As 1 - 2 / (exp(2 x) + 1), which neither overflows nor needs a library."""
    return softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))


@triton.jit
def fetch(pointer, table, key, seen, block_stride, key_stride, width: tl.constexpr, block_size: tl.constexpr,
          masked: tl.constexpr):  # fmt: skip
    """Keys or values [keys, width padded] of a head; zero where `masked` and not seen: 0 x NaN would be NaN."""
    padded: tl.constexpr = triton.next_power_of_2(width)
    d = tl.arange(0, padded)
    if masked:
        block = tl.load(table + key // block_size, mask=seen, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // block_size).to(tl.int64)
    at = pointer + (block * block_stride + (key % block_size) * key_stride)[:, None] + d[None, :]
    if width != padded:
        return tl.load(at, mask=(d < width)[None, :] & seen[:, None], other=0.0)
    if masked:
        return tl.load(at, mask=seen[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def attend_tile(
    q, top, total, acc, keys, values, table, first, seen_from, seen_to, position, scale, factor, softcap, window,
    block_stride, key_stride,
    width: tl.constexpr, block_size: tl.constexpr, block_n: tl.constexpr, masked: tl.constexpr,
    windowed: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    """One more tile of keys, first … first + block_n - 1, in the running (maximum, sum, output) of the rows.

    Keys outside seen_from … seen_to - 1 are not loaded; row r sees those up to position[r], `window` of them.
    `factor` brings scores to units of log 2.
    """
    key = first + tl.arange(0, block_n)
    seen = (key >= seen_from) & (key < seen_to)
    k = fetch(keys, table, key, seen, block_stride, key_stride, width, block_size, masked)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if capped:
        scores = bend(scores * scale, softcap)
    if masked:
        visible = seen[None, :] & (key[None, :] <= position[:, None])
        if windowed:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet stays at nothing
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.zeros_like(scores) - shift[:, None]))
    fade = tl.exp2(top - shift)
    total = tl.fma(total, fade, tl.sum(weights, 1))
    v = fetch(values, table, key, seen, block_stride, key_stride, width, block_size, masked)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def merge(top, total, acc, more_top, more_total, more):
    """The running (maximum, sum, output) with that of the next split. Merged with nothing, x is x."""
    higher = tl.maximum(top, more_top)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    fade, gain = tl.exp2(top - shift), tl.exp2(more_top - shift)
    return higher, tl.fma(more_total, gain, total * fade), faded_sum(acc, fade, more, gain)


@triton.jit
def faded_sum(acc, fade, more, gain):
    """acc * fade + more * gain, with fade and gain by row."""
    if len(acc.shape) == 2:
        gain = gain[:, None]
        fade = fade[:, None]
    return tl.fma(more, tl.zeros_like(more) + gain, acc * fade)


@triton.jit
def normalised(acc, total):
    """The output of rows that have seen what they see; zero for rows that see nothing."""
    if len(acc.shape) == 2:
        total = total[:, None]
    return acc / tl.where(total > 0.0, total, 1.0)
