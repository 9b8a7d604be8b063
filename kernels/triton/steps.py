# type: ignore  (the language of kernels is not Python's: types are those of the launchers)
"""Preparing a step from what the device keeps of each row: the host needs no number of it, so it can be captured.

What the state of rows is stands in kernels/resident.py, and what each kernel means in kernels/plain_resident.py. The
padding row stands for nobody; its keys go to the padding block.

The host sends differences only. Bytes: 8 a record; all are bounded by the launch, about 2 us each.
"""

import triton
import triton.language as tl


@triton.jit
def apply_differences(memory, count, records, block: tl.constexpr):
    """Grid (any): the first count[0] of records int32 [any, 2]: an address in memory, and the word that belongs there.

    No two records of a step write to one address: they are carried out in any order.
    """
    i = tl.program_id(0) * block + tl.arange(0, block)
    there = i < tl.load(count)
    address = tl.load(records + 2 * i, mask=there, other=0)
    tl.store(memory + address, tl.load(records + 2 * i + 1, mask=there, other=0), mask=there)


# Numbers that differ from step to step or from engine to engine do not make variants of their own.
@triton.jit(do_not_specialize=("count", "padding_row", "padding_block"))
def advance(
    places, tables, lengths, last_tokens, ids, positions, blocks, offsets, rows, starts, ends,
    count, padding_row, padding_block, table_stride, block_size: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    """Grid (1): a decode step of the rows in places[0] … places[count - 1]: each feeds its last token.

    Writes ids, positions, blocks, offsets, rows, ends (lengths with the new token; 0 for padding) [count], starts
    [count + 1], and counts the new token in the rows' lengths.
    """
    i = tl.arange(0, most)
    inside = i < count
    row = tl.load(places + i, mask=inside, other=0)
    live = inside & (row != padding_row)
    position = tl.load(lengths + row, mask=live, other=0)
    block = tl.load(tables + row.to(tl.int64) * table_stride + position // block_size, mask=live, other=0)
    token = tl.load(last_tokens + row, mask=live, other=0)
    tl.store(ids + i, token.to(ids.dtype.element_ty), mask=inside)
    tl.store(positions + i, position, mask=inside)
    tl.store(blocks + i, tl.where(live, block.to(tl.int32), padding_block), mask=inside)
    tl.store(offsets + i, position % block_size, mask=inside)
    tl.store(rows + i, row, mask=inside)
    tl.store(ends + i, tl.where(live, position + 1, 0), mask=inside)
    tl.store(starts + i, i, mask=inside)
    tl.store(starts + count + i, count + i, mask=i == 0)
    tl.store(lengths + row, position + 1, mask=live)


@triton.jit(do_not_specialize=("count", "padding_row"))
def open_entries(entries, lengths, rows, starts, ends, count, padding_row, most: tl.constexpr):
    """Grid (1): a mixed step's entries int32 [4, count]: row, first position, number of tokens, fed.

    Unused entries have no tokens and the padding row. Writes rows, ends [count], starts [count + 1], lengths.
    """
    i = tl.arange(0, most)
    inside = i < count
    row = tl.load(entries + i, mask=inside, other=0)
    first = tl.load(entries + count + i, mask=inside, other=0)
    tokens = tl.load(entries + 2 * count + i, mask=inside, other=0)
    tl.store(rows + i, row, mask=inside)
    tl.store(starts + 1 + i, tl.cumsum(tokens, 0), mask=inside)
    tl.store(starts + i, 0 * i, mask=i == 0)
    tl.store(ends + i, tl.where(tokens > 0, first + tokens, 0), mask=inside)
    tl.store(lengths + row, first + tokens, mask=inside & (tokens > 0) & (row != padding_row))


@triton.jit(do_not_specialize=("tokens", "count", "padding_row", "padding_block"))
def spread(
    entries, sent, starts, tables, last_tokens, ids, positions, token_rows, blocks, offsets,
    tokens, count, padding_row, padding_block, table_stride,
    block: tl.constexpr, block_size: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    """Grid (any): each of `tokens` places of a mixed step: its id, position, row, and where its key goes.

    Ids are those in sent [tokens], but for fed entries, whose one token is their row's last. Places past the entries'
    tokens are padding.
    """
    t, i = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, most)
    ends = tl.load(starts + 1 + i, mask=i < count, other=0x7FFFFFFF)
    entry = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), 1)
    inside = t < tokens
    live = inside & (entry < count)
    row = tl.load(entries + entry, mask=live, other=0)
    position = tl.load(entries + count + entry, mask=live, other=0) + t - tl.load(starts + entry, mask=live, other=0)
    position = tl.where(live, position, 0)
    fed = live & (tl.load(entries + 3 * count + entry, mask=live, other=0) > 0)
    token = tl.load(sent + t, mask=live & (fed == 0), other=0)
    token += tl.load(last_tokens + row, mask=fed, other=0).to(tl.int32)
    found = tl.load(tables + row.to(tl.int64) * table_stride + position // block_size, mask=live, other=0)
    tl.store(ids + t, token.to(ids.dtype.element_ty), mask=inside)
    tl.store(positions + t, position, mask=inside)
    tl.store(token_rows + t, tl.where(live, row, padding_row), mask=inside)
    tl.store(blocks + t, tl.where(live, found.to(tl.int32), padding_block), mask=inside)
    tl.store(offsets + t, position % block_size, mask=inside)


@triton.jit(do_not_specialize=("count",))
def lay_out(
    starts, ends, splits, tile_starts, count, window, split, tile_tokens,
    most: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """Grid (1): what attention asks for: splits of entries with one token, tiles of those with more, as running sums.

    starts [count + 1], ends [count] -> splits, tile_starts int32 [count + 1].
    """
    i = tl.arange(0, most)
    inside = i < count
    tokens = tl.load(starts + 1 + i, mask=inside, other=0) - tl.load(starts + i, mask=inside, other=0)
    length = tl.load(ends + i, mask=inside, other=0)
    first = tl.maximum(length - window, 0) // split if windowed else 0
    parts = tl.where(tokens == 1, tl.cdiv(length, split) - first, 0)  # none where nobody is
    tiles = tl.where(tokens > 1, tl.cdiv(tokens, tile_tokens), 0)
    tl.store(splits + 1 + i, tl.cumsum(parts, 0), mask=inside)
    tl.store(tile_starts + 1 + i, tl.cumsum(tiles, 0), mask=inside)
    tl.store(splits + i, 0 * i, mask=i == 0)
    tl.store(tile_starts + i, 0 * i, mask=i == 0)
