# type: ignore  (the language of kernels is not Python's: types are those of the launchers)
"""Paged attention of sequences with several query tokens: chunks and whole prefills of a mixed batch, in one launch.

The rows of a tile are `block_m` // group tokens with the group's query heads inside, so that one load of a key serves
all of them. The grid has a fixed number of tiles, of which tile_starts says how many there are: it can be captured.

FLOPs, H200 at 790 TFLOP/s: 4 * heads * D a pair of query and seen key. For 2,048 tokens of Llama-3.1-8B: 34 GFLOP and
44 us a layer, at the aim of 400 TFLOP/s 86 us. Bytes: a tile of 128 rows reads ctx * D * 2 * itemsize from the second
cache, 128 FLOPs a byte.

`prefill_tiles` walks through the keys in one go. `prefill_splits` is its batch-invariant variant: tiles of 16 rows and
the splits of `decode_splits`, merged in the same order, so that a position's bits are those that a decode gives it.
Its 16 rows share a load, 16 FLOPs a byte: bounded by the second cache, about 100 TFLOP/s; attention is 3 % of a
prefill's FLOPs at 2,048 tokens.
"""

import triton
import triton.language as tl

from kernels.triton.decode import attend_split
from kernels.triton.paged import attend_tile, entry_of, merge, normalised


@triton.jit
def locate(tile_starts, starts, lengths, count, group: tl.constexpr, block_m: tl.constexpr, most: tl.constexpr):
    """Of this program's tile: its entry, the rows' first token, how many of them are real, and the first's position.

    The longest come first: tiles are taken from the end, where causal ones have the most keys.
    """
    tokens: tl.constexpr = block_m // group
    number = tl.load(tile_starts + count) - 1 - tl.program_id(1)
    entry = entry_of(tile_starts, number, count, most)
    before = (number - tl.load(tile_starts + entry)) * tokens
    first = tl.load(starts + entry)
    queries = tl.load(starts + entry + 1) - first
    position = tl.load(lengths + entry) - queries + before
    return entry, (first + before).to(tl.int64), tl.minimum(queries - before, tokens), position


@triton.jit
def tile_rows(pointer, token, real, head, token_stride, head_stride, group: tl.constexpr, block_m: tl.constexpr,
              width: tl.constexpr):  # fmt: skip
    """Pointers [block_m, width padded] to the rows of a tile, and which are there."""
    padded: tl.constexpr = triton.next_power_of_2(width)
    r, d = tl.arange(0, block_m), tl.arange(0, padded)
    at = pointer + (token + r // group)[:, None] * token_stride + (head * group + r % group)[:, None] * head_stride
    return at + d[None, :], (r // group < real)[:, None] & (d < width)[None, :]


@triton.jit
def positions_of(first, real, group: tl.constexpr, block_m: tl.constexpr):
    """The position of each row; rows that are not there see nothing."""
    r = tl.arange(0, block_m)
    return tl.where(r // group < real, first + r // group, -1)


@triton.jit(do_not_specialize=("count",))
def prefill_tiles(
    q, keys, values, out, tables, rows, starts, lengths, tile_starts,
    scale, factor, softcap, window, count,
    q_token, q_head, block_stride, head_stride, key_stride, out_token, out_head, table_stride,
    group: tl.constexpr, width: tl.constexpr, block_size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    most: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads, tiles). Entry i owns the tokens starts[i] … starts[i + 1] - 1 of q and out [T, heads, D]."""
    if tl.program_id(1) >= tl.load(tile_starts + count):
        return
    head = tl.program_id(0)
    padded: tl.constexpr = triton.next_power_of_2(width)
    entry, token, real, first = locate(tile_starts, starts, lengths, count, group, block_m, most)
    at, inside = tile_rows(q, token, real, head, q_token, q_head, group, block_m, width)
    q_tile, position = tl.load(at, mask=inside, other=0.0), positions_of(first, real, group, block_m)
    seen_to = first + real
    seen_from = tl.maximum(first + 1 - window, 0) if windowed else 0
    start = seen_from // block_n * block_n
    whole_to = tl.maximum((first + 1) // block_n * block_n, start)  # tiles before it are behind all rows
    whole_from = start
    if windowed:  # and tiles from here on are in every row's window
        whole_from = tl.minimum(tl.cdiv(tl.maximum(seen_to - window, 0), block_n) * block_n, whole_to)
        whole_from = tl.maximum(whole_from, start)
    table = tables + tl.load(rows + entry).to(tl.int64) * table_stride
    keys, values = keys + head * head_stride, values + head * head_stride
    top = tl.full([block_m], float("-inf"), tl.float32)
    total, acc = tl.zeros([block_m], tl.float32), tl.zeros([block_m, padded], tl.float32)
    if windowed:
        for n in range(start, whole_from, block_n):
            top, total, acc = attend_tile(
                q_tile, top, total, acc, keys, values, table, n, seen_from, seen_to, position, scale, factor, softcap,
                window, block_stride, key_stride, width, block_size, block_n, True, windowed, capped,
            )  # fmt: skip
    for n in range(whole_from, whole_to, block_n):
        top, total, acc = attend_tile(
            q_tile, top, total, acc, keys, values, table, n, seen_from, seen_to, position, scale, factor, softcap,
            window, block_stride, key_stride, width, block_size, block_n, False, windowed, capped,
        )  # fmt: skip
    for n in range(whole_to, seen_to, block_n):
        top, total, acc = attend_tile(
            q_tile, top, total, acc, keys, values, table, n, seen_from, seen_to, position, scale, factor, softcap,
            window, block_stride, key_stride, width, block_size, block_n, True, windowed, capped,
        )  # fmt: skip
    at, inside = tile_rows(out, token, real, head, out_token, out_head, group, block_m, width)
    tl.store(at, normalised(acc, total).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("count",))
def prefill_splits(
    q, keys, values, out, tables, rows, starts, lengths, tile_starts,
    scale, factor, softcap, window, count,
    q_token, q_head, block_stride, head_stride, key_stride, out_token, out_head, table_stride,
    group: tl.constexpr, width: tl.constexpr, block_size: tl.constexpr, block_n: tl.constexpr, split: tl.constexpr,
    most: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    """As `prefill_tiles`, with the bits of `decode_splits` and `merge_splits`."""
    if tl.program_id(1) >= tl.load(tile_starts + count):
        return
    head = tl.program_id(0)
    padded: tl.constexpr = triton.next_power_of_2(width)
    entry, token, real, first = locate(tile_starts, starts, lengths, count, group, 16, most)
    at, inside = tile_rows(q, token, real, head, q_token, q_head, group, 16, width)
    q_tile, position = tl.load(at, mask=inside, other=0.0), positions_of(first, real, group, 16)
    seen_to = first + real
    seen_from = tl.maximum(first + 1 - window, 0) if windowed else 0
    table = tables + tl.load(rows + entry).to(tl.int64) * table_stride
    top = tl.full([16], float("-inf"), tl.float32)
    total, acc = tl.zeros([16], tl.float32), tl.zeros([16, padded], tl.float32)
    for begin in range(seen_from // split * split, seen_to, split):
        more_top, more_total, more = attend_split(
            q_tile, keys + head * head_stride, values + head * head_stride, table, begin, seen_from, seen_to, position,
            scale, factor, softcap, window, block_stride, key_stride,
            width, block_size, block_n, split, windowed, capped,
        )  # fmt: skip
        top, total, acc = merge(top, total, acc, more_top, more_total, more)
    at, inside = tile_rows(out, token, real, head, out_token, out_head, group, 16, width)
    tl.store(at, normalised(acc, total).to(out.dtype.element_ty), mask=inside)
