# type: ignore  (the language of kernels is not Python's: types are those of the launchers)
"""The lowest score that top-k, top-p and min-p keep, by bisection over the bits of a float: no sort of a vocabulary.

The definition is the engine's (engine/sampling/filters.py): top-k keeps what equals the k-th largest too; top-p keeps
a token if those before it, of what top-k kept, weigh less than p; a weight is a whole number, floor(exp(score) *
2^35), so that sums are exact in any order and the order in which `candidates` finds them shows nowhere.

Bytes, H200: `candidates` reads the logits once more, but for chunks that hold nothing likely; a candidate (within 24.5
of the best: what weighs anything) costs 4 bytes written and 31 reads from the caches. Usually they fit one block of
4,096, and the bound is the latency of 31 sums a filter.
"""

import triton
import triton.language as tl

from kernels.triton.lottery import row_best


@triton.jit
def candidates(
    logits, values, rows, temperatures, top_ks, top_ps, counters, found, logits_row, vocab,
    chunk: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Grid (B, chunks): the scores above -24.5 of rows that top-k or top-p filter, to found [B, vocab] in any order.

    counters int32 [B], zero before, count them. Scores are 0 for the best token and less for the others.
    """
    b, c, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + b)
    temperature, own = tl.load(temperatures + row), tl.load(values + b * chunks + c)
    filtered = (tl.load(top_ks + row) > 0) | (tl.load(top_ps + row) < 1.0)
    best, broken = row_best(values, b, chunks, padded)
    if filtered & (temperature > 0) & (broken == 0):  # noqa: SIM102 - a broken row has no difference
        if tl.div_rn(own - best, temperature) >= -24.5:
            i = c * chunk + tl.arange(0, chunk)
            x = tl.load(logits + b.to(tl.int64) * logits_row + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
            scores = tl.div_rn(x - best, tl.zeros_like(x) + temperature)
            likely = scores >= -24.5
            base = tl.atomic_add(counters + b, tl.sum(likely.to(tl.int32), 0))
            place = base + tl.cumsum(likely.to(tl.int32), 0) - 1
            tl.store(found + b.to(tl.int64) * vocab + place, scores, mask=likely)


@triton.jit
def find_floors(
    logits, values, rows, temperatures, top_ks, top_ps, min_floors, counters, found, floors, logits_row, vocab, chunks,
    block: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Grid (B): floors[b], float32. top_ks int32 (0: off), top_ps float64 (1: off), min_floors float32: log(min_p)."""
    b = tl.program_id(0)
    row = tl.load(rows + b)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    best, broken = row_best(values, b, chunks, padded)
    floor = tl.load(min_floors + row)
    if (temperature > 0) & (broken == 0):
        scores, count = found + b.to(tl.int64) * vocab, tl.load(counters + b)
        last = count * 0 + 0x7F800000  # the bits of the lowest score that is kept: minus infinity
        if top_k > 0:
            if count >= top_k:
                last = bisect(scores, count, 0.0, 1.0, last, top_k.to(tl.int64), block, False)
            else:
                whole = logits + b.to(tl.int64) * logits_row
                last = bisect(whole, vocab, best, temperature, last, top_k.to(tl.int64), block, False)
        if top_p < 1.0:
            target = mass(scores, count, 0.0, 1.0, last, block, True).to(tl.float64) * top_p
            target = tl.maximum(target, 1.0)
            last = bisect(scores, count, 0.0, 1.0, last, target, block, True)
        floor = tl.maximum(floor, -last.to(tl.float32, bitcast=True))
    tl.store(floors + b, floor)


@triton.jit
def bisect(x, count, best, temperature, last, target, block: tl.constexpr, weighed: tl.constexpr):
    """The least bits, at most `last`, such that scores down to them have a mass of at least the target."""
    low = last * 0
    for _ in range(31):
        middle = low + (last - low) // 2
        enough = mass(x, count, best, temperature, middle, block, weighed).to(target.dtype) >= target
        last, low = tl.where(enough, middle, last), tl.where(enough, low, middle + 1)
    return last


@triton.jit
def mass(x, count, best, temperature, last, block: tl.constexpr, weighed: tl.constexpr):
    """How many scores (x - best) / temperature are no lower than the one with these bits; or what they weigh. int64.

    Scores are not above 0: rising bits of their sizes are falling scores.
    """
    total = tl.zeros([block], tl.int64)
    for start in range(0, count, block):
        i = start + tl.arange(0, block)
        numbers = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
        scores = tl.div_rn(numbers - best, tl.zeros_like(numbers) + temperature)
        kept = (i < count) & (tl.abs(scores).to(tl.int32, bitcast=True) <= last)
        weight = tl.floor(tl.exp(scores) * 34359738368.0).to(tl.int64) if weighed else 1
        total += tl.where(kept, weight, 0)
    return tl.sum(total, 0)
