# type: ignore  (the language of kernels is not Python's: types are those of the launchers)
"""From a layer's product with q, k and v to turned queries, and keys and values in the cache: one launch.

Bytes, H200 at 4.3 TB/s: 2 * (heads + 2 * kv_heads) * D * itemsize a token, read and written once: 128 tokens of
Llama-3.1-8B are 3.1 MB and 0.7 us; below that a launch is the bound. About 12 FLOPs a number. A program takes 8 heads
of a token, so that a warp loads 16 bytes a thread. Tokens do not see one another: there is one variant.
"""

import triton
import triton.language as tl


@triton.jit
def norm_rope_store(
    qkv, q_norm, k_norm, cos, sin, turns, blocks, offsets, queries, keys, values, eps,
    qkv_token, turn_stride, query_token, block_stride, head_stride, key_stride,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, at_once: tl.constexpr,
    normed: tl.constexpr, turned: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, any): heads of qkv [T, heads + 2 kv_heads, width], normalised one by one and turned.

    cos and sin [any, width] as `Backend.rope` has them, row turns[t]; queries [T, heads, width]; token t's key and
    value go to block blocks[t], offset offsets[t] of the cache; a negative block is nobody's and nothing is written.
    """
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = width // 2
    padded: tl.constexpr = triton.next_power_of_2(half)
    head, i = tl.program_id(1) * at_once + tl.arange(0, at_once), tl.arange(0, padded)
    there = (head < heads + 2 * kv_heads)[:, None] & (i < half)[None, :]
    is_q, is_v = (head < heads)[:, None], (head >= heads + kv_heads)[:, None]
    at = qkv + token * qkv_token + head[:, None] * width + i[None, :]
    first = tl.load(at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=there, other=0.0).to(tl.float32)
    new_first, new_second = first, second
    if normed:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / width + eps)[:, None]
        new_first = first * scale * weights(q_norm, k_norm, i, is_q, half)
        new_second = second * scale * weights(q_norm, k_norm, i + half, is_q, width)
    if turned:
        angle = tl.load(turns + token).to(tl.int64) * turn_stride + i
        c = tl.load(cos + angle, mask=i < half, other=0.0)[None, :]
        s = tl.load(sin + angle + half, mask=i < half, other=0.0)[None, :]  # the first half of sin is negated
        new_first, new_second = new_first * c - new_second * s, new_second * c + new_first * s
    first, second = tl.where(is_v, first, new_first), tl.where(is_v, second, new_second)
    at = queries + token * query_token + head[:, None] * width + i[None, :]
    tl.store(at, first.to(queries.dtype.element_ty), mask=there & is_q)
    tl.store(at + half, second.to(queries.dtype.element_ty), mask=there & is_q)
    block = tl.load(blocks + token).to(tl.int64)
    kv_head = tl.where(is_v, head[:, None] - heads - kv_heads, head[:, None] - heads)
    place = block * block_stride + kv_head * head_stride + tl.load(offsets + token) * key_stride + i[None, :]
    stored = there & (block >= 0)
    store_halves(keys + place, first, second, stored & (is_q == is_v), half)  # neither a query nor a value
    store_halves(values + place, first, second, stored & is_v, half)


@triton.jit
def weights(q_norm, k_norm, i, is_q, end: tl.constexpr):
    """Columns i of the norms' weights, of queries or keys by row."""
    for_q = tl.load(q_norm + i, mask=i < end, other=0.0).to(tl.float32)
    for_k = tl.load(k_norm + i, mask=i < end, other=0.0).to(tl.float32)
    return tl.where(is_q, for_q[None, :], for_k[None, :])


@triton.jit
def store_halves(at, first, second, mask, half: tl.constexpr):
    tl.store(at, first.to(at.dtype.element_ty), mask=mask)
    tl.store(at + half, second.to(at.dtype.element_ty), mask=mask)
