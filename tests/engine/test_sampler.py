"""Which token is drawn: held token for token against the NumPy definition, with the noise that the counter gives."""

import random

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.sampler import Sampler
from engine.sampling import draw as draw_module
from engine.sampling import filters
from tests.engine.sampling import CPU, assert_distributed, defined_token, distribution, draw, draw_many, open_row

VOCAB = 160
END_IDS = (2, 9)
ALONE = {
    "nothing": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 5.0},
    "top-k-1": {"top_k": 1},
    "top-k-7": {"top_k": 7},
    "top-k-all": {"top_k": VOCAB},
    "top-k-beyond": {"top_k": 10**9},
    "top-k-off": {"top_k": -1},
    "top-p-tiny": {"top_p": 1e-9},
    "top-p-half": {"top_p": 0.5},
    "top-p-most": {"top_p": 0.99},
    "min-p": {"min_p": 0.05},
    "min-p-1": {"min_p": 1.0},
    "repetition-up": {"repetition_penalty": 1.8},
    "repetition-down": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.9},
    "presence-negative": {"presence_penalty": -1.9},
    "frequency": {"frequency_penalty": 1.3},
    "frequency-negative": {"frequency_penalty": -1.3},
    "bias": {"logit_bias": {3: 9.0, 4: -100.0, 159: 7.5}},
    "min-tokens": {"min_tokens": 5},
    "min-tokens-over": {"min_tokens": 4},
}
OUTPUT = (7, 7, 2, 30)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def supports(logits: list[float], sampling: SamplingParams, **row: object) -> set[int]:
    return set(draw_many(logits, sampling, 2000, **row).tolist())


@pytest.mark.parametrize("name", ALONE)
def test_each_parameter_alone_draws_by_its_definition(name):
    sampling = SamplingParams(seed=5, **ALONE[name])
    logits = logits_of(len(name))[0]
    logits[list(END_IDS)] += 4
    row = {"prompt": (1, 7, 11), "output": OUTPUT, "end_ids": END_IDS}
    drawn = draw_many(logits.tolist(), sampling, 200, **row)
    defined = [defined_token(logits.numpy(), sampling, 5, position, **row) for position in range(200)]
    compared = [(own, right) for own, right in zip(drawn.tolist(), defined, strict=True) if right is not None]
    assert len(compared) >= 180
    assert [own for own, _ in compared] == [right for _, right in compared]


def random_sampling(generator: random.Random) -> SamplingParams:
    pick = generator.choice
    return SamplingParams(
        temperature=pick([0.0, 1e-5, 0.2, 0.7, 1.0, 1.5, 4.0]),
        top_k=pick([0, -1, 1, 2, 5, 40, 159, 160, 1000]),
        top_p=pick([1.0, 1.0, 0.1, 0.5, 0.9, 0.999]),
        min_p=pick([0.0, 0.0, 0.01, 0.2]),
        repetition_penalty=pick([1.0, 1.0, 0.7, 1.3]),
        presence_penalty=pick([0.0, 0.0, -1.0, 1.5]),
        frequency_penalty=pick([0.0, 0.0, -0.5, 0.8]),
        logit_bias=pick([{}, {}, {generator.randrange(VOCAB): pick([-50.0, 2.0, 6.0]) for _ in range(5)}]),
        min_tokens=pick([0, 0, 3]),
        logprobs=pick([None, None, 2]),
        seed=generator.randrange(2**64),
    )


@pytest.mark.parametrize("batch", range(3))
def test_parameters_combined_in_a_mixed_batch_draw_by_their_definition(batch):
    generator = random.Random(batch)
    sampler = Sampler(96, VOCAB, CPU)
    slots = generator.sample(range(96), 64)
    rows = [
        {
            "prompt": generator.choices(range(VOCAB), k=generator.randrange(1, 20)),
            "output": generator.choices(range(VOCAB), k=generator.choice([0, 1, 4, 30])),
            "end_ids": generator.sample(range(VOCAB), generator.randrange(3)),
        }
        for _ in slots
    ]
    samplings = [random_sampling(generator) for _ in slots]
    sequences = [open_row(sampler, slot, s, **row) for slot, s, row in zip(slots, samplings, rows, strict=True)]
    logits, positions = logits_of(batch, 64), [sequence.length - 1 for sequence in sequences]
    drawn = draw(sampler, logits, sequences, positions).ids.tolist()
    compared = 0
    for own, values, sampling, position, row in zip(drawn, logits.numpy(), samplings, positions, rows, strict=True):
        if sampling.temperature == 0.0:
            right = int(distribution(values, sampling, **row).argmax())
        else:
            right = defined_token(values, sampling, sampling.seed, position, **row)
        compared += right is not None
        assert own == right or right is None, sampling
    assert compared >= 56


def test_ties_with_the_last_one_kept_are_kept():
    logits = [3.0, 2.0, 2.0, 2.0, 1.0, 0.0]
    assert supports(logits, SamplingParams(top_k=2, seed=1)) == {0, 1, 2, 3}
    assert supports(logits, SamplingParams(top_p=0.6, seed=1)) == {0, 1, 2, 3}
    assert supports(logits, SamplingParams(top_p=1e-9, seed=1)) == {0}
    assert supports([2.0, *logits[1:]], SamplingParams(top_p=1e-9, seed=1)) == {0, 1, 2, 3}
    assert supports([2.0, *logits[1:]], SamplingParams(min_p=1.0, seed=1)) == {0, 1, 2, 3}


def test_the_nucleus_is_that_of_the_tokens_which_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert supports(logits, SamplingParams(top_p=0.65, seed=1)) == {0, 1}
    # Of 0.4 and 0.3 alone the first has 0.571 already.
    assert supports(logits, SamplingParams(top_k=2, top_p=0.55, seed=1)) == {0}


def test_filters_see_the_temperature():
    logits = np.log([0.6, 0.3, 0.1]).tolist()
    assert supports(logits, SamplingParams(min_p=0.6, seed=1)) == {0}
    assert supports(logits, SamplingParams(min_p=0.6, temperature=2.0, seed=1)) == {0, 1}
    assert supports(logits, SamplingParams(top_p=0.65, seed=1)) == {0, 1}
    assert supports(logits, SamplingParams(top_p=0.65, temperature=0.5, seed=1)) == {0}


def test_a_nucleus_wider_than_the_first_guess_is_found(monkeypatch):
    monkeypatch.setattr(filters, "HEAD", 8)
    logits = logits_of(4)[0] / 6
    sampling = SamplingParams(top_p=0.8, seed=3)
    defined = distribution(logits.numpy(), sampling)
    assert (defined > 0).sum() > 40
    assert_distributed(np.bincount(draw_many(logits.tolist(), sampling, 1500), minlength=VOCAB), defined)


def test_one_rows_nucleus_leaves_the_tail_of_another_alone(monkeypatch):
    """top_p = 1 means all tokens, even those beyond the point where a float32 sum of probabilities reaches 1."""
    logits = torch.zeros(2, 450)
    logits[:, 350:] = -24.0  # before them the sum is 1 + 2**-23
    monkeypatch.setattr(draw_module, "FINALISTS", 450)
    monkeypatch.setattr(draw_module, "gumbel", lambda keys, ids: torch.where(ids == 449, 60.0, 0.0))
    sampler = Sampler(2, 450, CPU)
    whole = open_row(sampler, 0, SamplingParams(min_p=1e-30))
    nucleus = open_row(sampler, 1, SamplingParams(top_p=0.5))
    assert draw(sampler, logits, [whole, nucleus], [1, 1]).ids.tolist() == [449, 0]


def test_greedy_ties_go_to_the_lowest_id_alone_and_beside_a_drawing_row():
    sampler = Sampler(2, 3, CPU)
    greedy = open_row(sampler, 0, SamplingParams(temperature=0.0))
    drawing = open_row(sampler, 1, SamplingParams(seed=3))
    logits = torch.tensor([[1.0, 1.0, 0.0]])
    others: set[int] = set()
    for position in range(50):
        assert draw(sampler, logits, [greedy], [position]).ids.tolist() == [0]
        first, other = draw(sampler, logits.repeat(2, 1), [greedy, drawing], [position] * 2).ids.tolist()
        assert first == 0
        others.add(other)
    assert others == {0, 1, 2}


@pytest.mark.parametrize("vocab_size", [2, 17, 160, 49152])
def test_greedy_takes_the_first_of_equal_maxima_wherever_they_are(vocab_size):
    generator = random.Random(vocab_size)
    sampler = Sampler(1, vocab_size, CPU)
    greedy = open_row(sampler, 0, SamplingParams(temperature=0.0), prompt=[0])
    for _ in range(20):
        best = sorted(generator.sample(range(vocab_size), min(vocab_size, 3)))
        logits = torch.zeros(1, vocab_size)
        logits[0, best] = 2.0
        assert draw(sampler, logits, [greedy], [1]).ids.item() == best[0]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6, 9.9e-6])
def test_a_temperature_below_the_limit_is_greedy(temperature):
    assert supports([1.0, 1.0, 0.0], SamplingParams(temperature=temperature, seed=1)) == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_tiny_temperature_stays_finite_and_takes_the_best(dtype, scale):
    logits = torch.linspace(-3, 3, 50).mul(scale).to(dtype).float()
    drawn = draw_many(logits.tolist(), SamplingParams(temperature=1e-4, seed=8), 500)
    assert set(drawn.tolist()) == {49}
    assert set(draw_many(logits.tolist(), SamplingParams(temperature=1e-5, top_p=0.9, seed=8), 500)) == {49}


def test_the_highest_temperatures_draw_evenly():
    for temperature in (1e6, 3e38, 1e39, 1e300):
        counts = np.bincount(draw_many([5.0, 0.0, -5.0], SamplingParams(temperature=temperature, seed=2), 3000))
        assert_distributed(counts, np.full(3, 1 / 3))


@pytest.mark.parametrize(
    "extreme",
    [
        {"logit_bias": {1: 3.4e38, 0: 3e38}, "temperature": 1e-5},
        {"logit_bias": {1: 3.4e38}, "temperature": 1e-5, "top_p": 0.5, "min_p": 0.1},
        {"repetition_penalty": 1e-46, "temperature": 1e-5},
        {"repetition_penalty": 1e-46, "top_p": 0.9},
        {"repetition_penalty": 1e-38, "logit_bias": {1: 3.4e38}},
    ],
)
def test_scores_beyond_float32_still_draw_the_best(extreme):
    """Token 1 is far above all others, whatever overflows on the way; it is the prompt, so penalties touch it alone."""
    assert supports([2.0, 3.0, 1.0, 0.0], SamplingParams(seed=1, **extreme)) == {1}


@pytest.mark.parametrize("penalty", [1e38, 1e39, 1e300])
def test_a_huge_repetition_penalty_bans_what_was_seen_below_zero(penalty):
    logits = [0.0, -1.0, 3.0, -2.0]
    assert supports(logits, SamplingParams(repetition_penalty=penalty, seed=1), prompt=(0, 1, 2)) == {0, 2, 3}
