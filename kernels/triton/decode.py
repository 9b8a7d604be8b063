# type: ignore  (the language of kernels is not Python's: types are those of the launchers)
"""Paged attention of sequences with one query token: split over absolute positions, then merged in order.

Flash-decoding (Dao et al. 2023) with splits that begin at multiples of `split`, whoever else is in the batch: a row's
bits depend on itself alone, so there is one variant, deterministic or not. The group's query heads are packed into the
rows of one matrix product, padded to 16.

Bytes, H200 at 4.3 TB/s: keys and values are read once, B * ctx * kv_heads * D * 2 * itemsize; partial outputs add 2 *
group * D * 4 for each split of split * D * 2 * itemsize, that is 2 % for a group of 4, split 512 and bfloat16. For
Llama-3.1-8B (8 key/value heads of 128) at a context of 1,024: 4.2 MB and 1.0 us a sequence and layer. FLOPs: 4 * 16
rows * D a key with the padding, 16 a byte: an eighth of what the matrix units would need to be the bound.
"""

import triton
import triton.language as tl

from kernels.triton.paged import attend_tile, entry_of, merge, normalised


@triton.jit(do_not_specialize=("count",))
def decode_splits(
    q, keys, values, tables, rows, starts, lengths, splits, outs, tops, totals,
    scale, factor, softcap, window, count,
    q_token, q_head, block_stride, head_stride, key_stride, table_stride,
    group: tl.constexpr, width: tl.constexpr, block_size: tl.constexpr, block_n: tl.constexpr, split: tl.constexpr,
    most: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads, any): each program takes every so-manieth split of all sequences, splits[count] of them.

    Entry i has the query token starts[i], the table row rows[i], lengths[i] positions, and the splits
    splits[i] … splits[i + 1] - 1 (none if it is no decode). Split s of head h goes to outs[s, h * group + g, D],
    tops and totals [s, heads]: float32, not normalised.
    """
    head, heads = tl.program_id(0), tl.num_programs(0)
    padded: tl.constexpr = triton.next_power_of_2(width)
    g, d = tl.arange(0, 16), tl.arange(0, padded)
    inside = (g < group)[:, None] & (d < width)[None, :]
    for number in range(tl.program_id(1), tl.load(splits + count), tl.num_programs(1)):
        entry = entry_of(splits, number, count, most)
        length, token = tl.load(lengths + entry), tl.load(starts + entry).to(tl.int64)
        seen_from = tl.maximum(length - window, 0) if windowed else 0
        first = (seen_from // split + number - tl.load(splits + entry)) * split
        at = q + token * q_token + (head * group + g)[:, None] * q_head + d[None, :]
        top, total, acc = attend_split(
            tl.load(at, mask=inside, other=0.0), keys + head * head_stride, values + head * head_stride,
            tables + tl.load(rows + entry).to(tl.int64) * table_stride, first, seen_from, length,
            tl.where(g < group, length - 1, -1), scale, factor, softcap, window, block_stride, key_stride,
            width, block_size, block_n, split, windowed, capped,
        )  # fmt: skip
        place = ((number * heads + head) * group + g).to(tl.int64)
        tl.store(outs + place[:, None] * width + d[None, :], acc, mask=inside)
        tl.store(tops + place, top, mask=g < group)
        tl.store(totals + place, total, mask=g < group)


@triton.jit
def attend_split(
    q, keys, values, table, first, seen_from, seen_to, position, scale, factor, softcap, window,
    block_stride, key_stride,
    width: tl.constexpr, block_size: tl.constexpr, block_n: tl.constexpr, split: tl.constexpr,
    windowed: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    """(maximum, sum, output) of query rows over the split that begins at key `first`."""
    padded: tl.constexpr = triton.next_power_of_2(width)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], padded], tl.float32)
    for n in range(first, tl.minimum(first + split, seen_to), block_n):
        top, total, acc = attend_tile(
            q, top, total, acc, keys, values, table, n, seen_from, seen_to, position, scale, factor, softcap, window,
            block_stride, key_stride, width, block_size, block_n, True, windowed, capped,
        )  # fmt: skip
    return top, total, acc


@triton.jit
def merge_splits(
    outs, tops, totals, splits, starts, out, heads, out_token, out_head,
    width: tl.constexpr,
):  # fmt: skip
    """Grid (entries, heads): the splits of one entry and head, merged in order, to out [T, heads, D].

    Entries without splits are left alone. Bytes: 4 * D a split and head, a few per cent of the splits' own.
    """
    entry, head = tl.program_id(0), tl.program_id(1)
    padded: tl.constexpr = triton.next_power_of_2(width)
    d = tl.arange(0, padded)
    first, end = tl.load(splits + entry), tl.load(splits + entry + 1)
    if first < end:
        top = tl.full([1], float("-inf"), tl.float32)
        total, acc = tl.zeros([1], tl.float32), tl.zeros([padded], tl.float32)
        for number in range(first, end):
            place = (number * heads + head).to(tl.int64)
            more = tl.load(outs + place * width + d, mask=d < width, other=0.0)
            more_top, more_total = tl.load(tops + place), tl.load(totals + place)
            top, total, acc = merge(top, total, acc, more_top, more_total, more)
        at = out + tl.load(starts + entry).to(tl.int64) * out_token + head * out_head
        tl.store(at + d, normalised(acc, total).to(out.dtype.element_ty), mask=d < width)
