"""Tokens drawn on the interpreter against the engine's own sampler, which is their definition; and the noise's bits."""

import math
import random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine import SamplingParams
from engine.sampler import Sampler
from engine.sampling.filters import nucleus_floor, top_k_floor
from kernels import Parameters, block_maxima, gumbel, ranks, row_keys
from kernels.triton import lottery
from kernels.triton.sampling import CHUNK, Lottery
from tests.engine.sampling import CPU, draw, open_row

VOCAB = CHUNK + 905


@triton.jit
def noise_kernel(seeds, positions, places, noise, size: tl.constexpr):
    i = tl.arange(0, size)
    first, second = lottery.row_keys(tl.load(seeds + tl.program_id(0)), tl.load(positions + tl.program_id(0)))
    rank = lottery.ranks(first, second, i)
    tl.store(places + tl.program_id(0) * size + i, rank)
    tl.store(noise + tl.program_id(0) * size + i, lottery.gumbel(rank))


@triton.jit
def reach_kernel(scores, rank, out, size: tl.constexpr):
    i = tl.arange(0, size)
    tl.store(out + i, lottery.reach(tl.load(scores + i), tl.load(rank + i)))


@triton.jit
def win_kernel(scores, keys, out, size: tl.constexpr):
    i = tl.arange(0, size)
    none = tl.load(scores) * 0 - float("inf")
    _, winner = lottery.win(tl.load(scores + i), tl.load(keys), tl.load(keys + 1), i, none, 0x7FFFFFFF)
    tl.store(out, winner)


def test_triton_lottery_gives_equals_to_the_lowest_token():
    """Scores that undo the noise, so that hundreds of sums are the same float."""
    ids, differ = torch.arange(1024), set()
    for position in range(5):
        keys, out = row_keys(torch.tensor([3]), torch.tensor([position])), torch.zeros(1, dtype=torch.int32)
        scores = 10 - gumbel(keys, ids)[0]
        totals = scores + gumbel(keys, ids)[0]
        best = (totals == totals.max()).nonzero().squeeze(1)
        win_kernel[(1,)](scores, keys[0], out, size=1024)
        assert out.item() == best[0]
        differ.add(len(best) > 1)
    assert True in differ


def test_triton_noise_has_the_bits_of_its_definition():
    seeds = torch.tensor([0, 1, -1, 2**31, 2**63 - 1, -(2**63), 123456789123456789])
    positions = torch.tensor([0, 1, 511, 2**20 + 7, 2**31 - 1, 5, 7], dtype=torch.int32)
    places, noise = torch.zeros(7, 1024, dtype=torch.int32), torch.zeros(7, 1024)
    noise_kernel[(7,)](seeds, positions, places, noise, size=1024)
    keys, ids = row_keys(seeds, positions), torch.arange(1024, dtype=torch.int32)
    assert torch.equal(places, ranks(keys, ids))
    assert torch.equal(noise, gumbel(keys, ids))


def test_triton_reach_is_never_too_low():
    rank = torch.tensor([0, 1, 2, 1000, 2**20, 2**30, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    for score in (0.0, -5.0, -80.0):
        scores, out = torch.full((8,), score), torch.zeros(8)
        reach_kernel[(1,)](scores, rank, out, size=8)
        noise = -(-(-(rank.double() + 0.5) / 2**31).log1p()).log()
        assert bool((out.double() >= score + noise).all())
        assert bool((out.double()[1:5] < score + noise[1:5] + 1).all())


def parameters(asked: list[SamplingParams], sampler: Sampler) -> Parameters:
    rows = range(len(asked))
    temperatures, top_ps, top_ks, min_ps = (
        torch.tensor([getattr(one, name) for one in asked], dtype=torch.float64)
        for name in ("temperature", "top_p", "top_k", "min_p")
    )
    last = torch.full((len(asked),), -1, dtype=torch.int32)
    seeds = sampler._rows.seeds[list(rows)]
    return Parameters(temperatures.float(), top_ks.int(), top_ps, min_ps.log().float(), seeds, last)


def floors(logits: Tensor, asked: list[SamplingParams]) -> list[float]:
    """The lowest score that each row keeps, by the engine's filters."""
    found = []
    for row, one in zip(logits, asked, strict=True):
        scores = ((row - row.max()) / torch.tensor(one.temperature))[None]
        floor = torch.tensor([-math.inf])
        if one.top_k:
            floor = top_k_floor(scores, block_maxima(scores), torch.tensor([one.top_k]), one.top_k)
            scores = scores.masked_fill(scores < floor, -math.inf)
        if one.top_p < 1:
            floor = nucleus_floor(scores, block_maxima(scores), torch.tensor([one.top_p], dtype=torch.float64))
        found.append(max(floor.item(), math.log(one.min_p) if one.min_p else -math.inf))
    return found


def compare(logits: Tensor, asked: list[SamplingParams], positions: list[int], **kinds: bool) -> list[int]:
    """Both samplers draw the same tokens; their tokens."""
    sampler = Sampler(len(asked), logits.shape[1], CPU)
    sequences = [open_row(sampler, row, one, name=f"r{row}") for row, one in enumerate(asked)]
    expected = draw(sampler, logits, sequences, positions)
    rows, places = torch.arange(len(asked), dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
    out, broken = torch.full((2, len(asked)), -7, dtype=torch.int32)
    state = parameters(asked, sampler)
    kinds = {"random": True, "filtered": True} | kinds
    lots = Lottery(len(asked), logits.shape[1], CPU)
    lots.draw(logits, rows, places, state, out, broken, **kinds)
    assert out.tolist() == expected.ids.tolist()
    assert broken.bool().tolist() == expected.broken.tolist()
    assert torch.equal(state.last_tokens, out)
    if kinds["filtered"] and not any(broken) and all(one.temperature for one in asked):
        assert lots._floors.tolist() == pytest.approx(floors(logits, asked), rel=1e-7)
    return out.tolist()


def normal(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_triton_greedy_takes_the_lowest_of_equals():
    logits = normal(4, VOCAB).clamp(max=4)
    logits[0, [7, CHUNK + 3]] = logits[1, [CHUNK + 3, VOCAB - 1]] = 9.0
    tokens = compare(logits, [SamplingParams(temperature=0)] * 4, [1] * 4, random=False, filtered=False)
    assert tokens[:2] == [7, CHUNK + 3]


def test_triton_rows_without_a_number_are_broken():
    logits = normal(6, VOCAB)
    logits[0, CHUNK + 5], logits[1, 0], logits[2], logits[3, 4] = math.nan, math.inf, -math.inf, -math.inf
    compare(logits, [SamplingParams(temperature=t) for t in (0, 0, 0, 0, 1, 1)], [2] * 6)
    compare(logits, [SamplingParams(temperature=1, top_k=3)] * 6, [2] * 6)


def test_triton_draws_what_the_engines_sampler_draws():
    generator = random.Random(1)
    asked = [SamplingParams(temperature=generator.choice([0.3, 1, 1.7])) for _ in range(6)]
    compare(normal(6, VOCAB), asked, [generator.randrange(2**31) for _ in asked], filtered=False)


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 1}, {"top_k": 5}, {"top_k": 3000}, {"top_p": 0.01}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8},
     {"min_p": 0.1}, {"top_k": 50, "top_p": 0.95, "min_p": 0.05}],
    ids=str,
)  # fmt: skip
def test_triton_filters_draw_what_the_engines_sampler_draws(filters):
    asked = [SamplingParams(temperature=1.5, **filters), SamplingParams(temperature=0.7, **filters)]
    compare(normal(2, VOCAB), asked, [3, 4])


def test_triton_filters_search_the_whole_row_where_likely_tokens_are_too_few():
    """Almost everything is 24.5 below the best, or further: top-k's floor lies there."""
    logits = normal(2, 1500) * 10
    asked = [SamplingParams(temperature=0.2, top_k=700), SamplingParams(temperature=0.2, top_k=1400, top_p=0.99)]
    compare(logits, asked, [1, 2])


def test_triton_filters_keep_equals_together():
    """Whole numbers, so that hundreds of tokens tie at every floor."""
    logits = normal(3, 3000).round()
    asked = [
        SamplingParams(temperature=1, **one) for one in ({"top_k": 700}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.7})
    ]
    for position in (0, 1):
        compare(logits, asked, [position] * 3)


def test_triton_tokens_do_not_depend_on_the_batch():
    logits = normal(3, VOCAB, seed=4)
    asked = [SamplingParams(temperature=0), SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.9)]
    mixed = compare(logits, asked, [5, 6, 7])
    assert compare(logits[:2], asked[:2], [5, 6], filtered=False) == mixed[:2]
    assert compare(logits[:1], asked[:1], [5], random=False, filtered=False) == mixed[:1]
