# type: ignore  (the language of kernels is not Python's: types are those of the launchers)
"""From logits to tokens: the best of each chunk of a row, the lottery among what the filters keep, the winner.

The definition is the engine's (engine/sampling/draw.py): of the tokens that are kept, the one with the largest score +
noise in float32, of several the lowest id; score = (logit - best) / temperature. Noise is that of kernels/noise.py,
bit for bit but for what two good float64 logarithms differ in after rounding to float32. A row sees its own numbers
only.

Bytes and FLOPs, H200 at 4.3 TB/s: one pass over B * vocabulary * 4 bytes (128 rows of 128,256: 66 MB, 15 us), a second
one for rows that draw, which the second cache holds half of. Ten whole-number operations a token for its place in the
lottery; float64 logarithms for the few that can still win, on average about two a chunk.
"""

import triton
import triton.language as tl


@triton.jit
def mix32(h):
    """As kernels.noise._mix32."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * -2048144789
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -1028477387
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def row_keys(seed, position):
    """As kernels.noise.row_keys: seed int64, position int32."""
    low = mix32(seed.to(tl.int32) ^ -1640531527)
    high = mix32((seed >> 32).to(tl.int32) ^ low)
    return mix32(low ^ position), mix32(high + position * 2135587861)


@triton.jit
def ranks(first, second, token):
    """As kernels.noise.ranks, for one row's keys."""
    h = token ^ (first & 0x7FFFFFFF)
    h = (h ^ (h >> 16)) * -2048144789
    h = (h ^ (h >> 13) ^ second) * -1028477387
    return h ^ (h >> 16)


@triton.jit
def gumbel(rank):
    """As kernels.noise.gumbel. 1 - v = (2^32 - 2 rank - 1) / 2^32 is exact in float64, so log serves for log1p."""
    rest = (4294967295 - 2 * rank.to(tl.int64)).to(tl.float64) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(rest))).to(tl.float32)


@triton.jit
def reach(scores, rank):
    """How far score plus noise can come, never too low: as kernels.noise.reach, with its constant and some slack."""
    bits = rank.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
    return scores - bits * 8.262958294867817e-08 + 109.52


@triton.jit
def chunk_best(logits, values, tokens, counters, logits_row, vocab, chunk: tl.constexpr):
    """Grid (B, chunks): the largest number of each chunk of logits [B, vocab] and the lowest token that has it.

    values float32 and tokens int32 [B, chunks]; NaN where one is among them. Sets counters[b] to 0 for `candidates`.
    """
    b, c = tl.program_id(0), tl.program_id(1)
    i = c * chunk + tl.arange(0, chunk)
    x = tl.load(logits + b.to(tl.int64) * logits_row + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    best = tl.max(x, 0)
    place = b * tl.num_programs(1) + c
    tl.store(values + place, tl.where(broken, float("nan"), best))
    tl.store(tokens + place, tl.min(tl.where(x == best, i, 0x7FFFFFFF), 0))
    if c == 0:
        tl.store(counters + b, 0)


@triton.jit
def row_best(values, b, chunks, padded: tl.constexpr):
    """The largest logit of a row, and whether it is a number at all."""
    i = tl.arange(0, padded)
    x = tl.load(values + b * chunks + i, mask=i < chunks, other=float("-inf"))
    best = tl.max(x, 0)
    broken = (tl.max((x != x).to(tl.int32), 0) > 0) | (best == float("inf")) | (best == float("-inf"))
    return best, broken


@triton.jit
def draw(
    logits, values, tokens, floors, rows, temperatures, seeds, positions, totals, winners, logits_row, vocab,
    chunk: tl.constexpr, padded: tl.constexpr, filtered: tl.constexpr,
):  # fmt: skip
    """Grid (B, chunks): the largest score + noise of each chunk, and whose it is: totals, winners [B, chunks].

    Greedy rows (temperature 0) keep `chunk_best`'s. Parameters are those of row rows[b]; positions int32 [B] are those
    of the tokens to be drawn; floors [B] are `find_floors`', read if `filtered`.
    """
    b, c, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place, row = b * chunks + c, tl.load(rows + b)
    best, broken = row_best(values, b, chunks, padded)
    temperature, own = tl.load(temperatures + row), tl.load(values + place)
    floor = tl.load(floors + b) if filtered else float("-inf")
    total, winner = own, tl.load(tokens + place)
    if (temperature > 0) & (broken == 0):
        total, winner = float("-inf") + own * 0, winner * 0 + 0x7FFFFFFF
        if (own > float("-inf")) & (tl.div_rn(own - best, temperature) >= floor):
            i = c * chunk + tl.arange(0, chunk)
            x = tl.load(logits + b.to(tl.int64) * logits_row + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
            scores = tl.div_rn(x - best, tl.zeros_like(x) + temperature)
            scores = tl.where(scores >= floor, scores, float("-inf"))
            first, second = row_keys(tl.load(seeds + row), tl.load(positions + b))
            total, winner = win(scores, first, second, i, total, winner)
    tl.store(totals + place, total)
    tl.store(winners + place, winner)


@triton.jit
def win(scores, first, second, i, total, winner):
    """The largest score + noise among tokens i: noise only for those that reach further than the best one so far."""
    reaches = reach(scores, ranks(first, second, i))
    furthest = tl.max(reaches, 0)
    while (furthest > float("-inf")) & (furthest >= total):
        who = tl.min(tl.where(reaches == furthest, i, 0x7FFFFFFF), 0)
        more = tl.max(tl.where(i == who, scores, float("-inf")), 0) + gumbel(ranks(first, second, who))
        better = (more > total) | ((more == total) & (who < winner))
        total, winner = tl.where(better, more, total), tl.where(better, who, winner)
        reaches = tl.where(i == who, float("-inf"), reaches)
        furthest = tl.max(reaches, 0)
    return total, winner


@triton.jit
def choose(values, totals, winners, rows, last_tokens, out, broken_out, chunks, padded: tl.constexpr):
    """Grid (B): out[b] and last_tokens[rows[b]] are the row's token; without one they are 0 and broken_out[b] is 1."""
    b, i = tl.program_id(0), tl.arange(0, padded)
    _, broken = row_best(values, b, chunks, padded)
    x = tl.load(totals + b * chunks + i, mask=i < chunks, other=float("-inf"))
    token = tl.load(winners + b * chunks + i, mask=i < chunks, other=0x7FFFFFFF)
    winner = tl.min(tl.where(x == tl.max(x, 0), token, 0x7FFFFFFF), 0)
    winner = tl.where(broken, 0, winner)
    tl.store(out + b, winner.to(out.dtype.element_ty))
    tl.store(last_tokens + tl.load(rows + b), winner.to(last_tokens.dtype.element_ty))
    tl.store(broken_out + b, broken.to(broken_out.dtype.element_ty))
