"""The lottery of captured steps, in plain torch, against the engine's sampler, which is the definition of a token."""

import math
import random

import pytest
import torch

from engine import SamplingParams
from engine.differences import Differences
from engine.sampler import Sampler
from kernels import State
from kernels.plain_resident import PlainLottery, PlainResident
from tests.engine.sampling import CPU, draw, open_row

VOCAB, ROWS = 700, 12


def asked(source: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=source.choice([0.0, 1e-6, 0.3, 1.0, 5.0, 1e30]), top_k=source.choice([0, 0, 1, 7, 699, 700, 5000]),
        top_p=source.choice([1.0, 1.0, 0.999, 0.6, 0.1, 1e-9]), min_p=source.choice([0.0, 0.0, 0.01, 0.5, 1.0]),
        seed=source.choice([None, 0, 1, 2**63, 2**64 - 1, source.randrange(2**64)]),
    )  # fmt: skip


def logits_of(kind: str, seed: int) -> torch.Tensor:
    """Ordinary ones; such with many equals; such that forbid most; such that are not numbers."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "equals":
        return logits.round()
    if kind == "forbidden":
        return logits.masked_fill(torch.arange(VOCAB) % 97 > 2, -math.inf)
    if kind == "broken":
        logits[0, 5], logits[1, 6], logits[2] = math.nan, math.inf, -math.inf
    return logits


@pytest.mark.parametrize("kind", ["ordinary", "equals", "forbidden", "broken"])
@pytest.mark.parametrize("seed", range(6))
def test_the_lottery_draws_what_the_sampler_draws(kind, seed):
    """By parameters that were told as differences, for rows in any order, beside places of nobody."""
    source = random.Random(seed)
    sampler, state = Sampler(ROWS, VOCAB, CPU), State.make(ROWS, 1, 16, CPU)
    state.clear(0)
    differences = Differences(state, VOCAB)
    sequences = [
        open_row(sampler, row, asked(source), name=f"{seed} {row}") for row in source.sample(range(ROWS), ROWS)
    ]
    for sequence in sequences:
        differences.open(sequence)
    records = torch.tensor(differences.take(), dtype=torch.int32).view(-1, 2)
    PlainResident().apply(state, torch.tensor([len(records)], dtype=torch.int32), records)
    logits, positions = logits_of(kind, seed), [source.randrange(2**20) for _ in sequences]
    expected = draw(sampler, logits.clone(), sequences, positions)
    rows = torch.tensor([*(sequence.row for sequence in sequences), ROWS], dtype=torch.int32)
    out, broken = torch.full((2, ROWS + 1), -1, dtype=torch.int32)
    PlainLottery().draw(
        torch.cat((logits, logits[:1])), rows, torch.tensor([*positions, 0], dtype=torch.int32), state.parameters, out,
        broken, random=True, filtered=True,
    )  # fmt: skip
    assert out[:-1].tolist() == expected.ids.tolist()
    assert broken[:-1].tolist() == expected.broken.int().tolist()
    assert state.last_tokens[rows.long()][:-1].tolist() == expected.ids.tolist()
