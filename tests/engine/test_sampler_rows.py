"""A row depends on its own request: not on batch mates, slots or neighbours. Draws follow their distribution."""

import json
import random

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.sampler import Sampler, token_logprobs
from engine.sequence import default_seed
from tests.engine.sampling import CPU, assert_distributed, distribution, draw, draw_many, open_row
from tests.engine.test_sampler import random_sampling

EDGE_SEEDS = [0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]


class Mixed:
    """A batch of very different rows, to be drawn whole, one by one, or in another order and other slots."""

    def __init__(self, seed: int, vocab_size: int, count: int) -> None:
        generator = random.Random(seed)
        self.vocab_size, self.count = vocab_size, count
        self.samplings = [random_sampling(generator) for _ in range(count)]
        self.rows = [
            {"prompt": generator.choices(range(160), k=9), "output": generator.choices(range(160), k=index % 5)}
            for index in range(count)
        ]
        self.logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
        self.positions = [generator.randrange(9, 100_000) for _ in range(count)]

    def drawn(self, order: list[int], slots: list[int]) -> dict[int, tuple]:
        sampler = Sampler(max(slots) + 1, self.vocab_size, CPU)
        sequences = [
            open_row(sampler, slot, self.samplings[index], **self.rows[index])
            for index, slot in zip(order, slots, strict=True)
        ]
        result = draw(sampler, self.logits[order], sequences, [self.positions[index] for index in order])
        return dict(zip(order, zip(result.ids.tolist(), result.logprobs, strict=True), strict=True))


@pytest.mark.parametrize("vocab_size", [161, 2048, 5003])
def test_a_draw_never_depends_on_batch_mates_or_slots(vocab_size):
    mixed = Mixed(vocab_size, vocab_size, 40)
    together = mixed.drawn(list(range(40)), list(range(40)))
    for index in range(40):
        assert mixed.drawn([index], [0])[index] == together[index]
    for seed in range(5):
        generator = random.Random(seed)
        order = generator.sample(range(40), generator.randrange(2, 40))
        slots = generator.sample(range(64), len(order))
        assert mixed.drawn(order, slots) == {index: together[index] for index in order}


def test_a_row_is_not_haunted_by_who_had_its_slot_before():
    sampler = Sampler(1, 160, CPU)
    logits = torch.randn(1, 160, generator=torch.Generator().manual_seed(0))
    haunting = SamplingParams(
        seed=9, top_k=2, top_p=0.1, min_p=0.9, temperature=9.0, repetition_penalty=3.0, frequency_penalty=2.0,
        presence_penalty=2.0, logit_bias={5: 50.0}, min_tokens=9,
    )  # fmt: skip
    for sampling in (SamplingParams(seed=1), SamplingParams(seed=1, repetition_penalty=1.5, frequency_penalty=-2.0)):
        draw(sampler, logits, [open_row(sampler, 0, haunting, prompt=range(160), output=range(160))], [5])
        after = draw(sampler, logits, [open_row(sampler, 0, sampling)], [1]).ids.item()
        fresh = Sampler(1, 160, CPU)
        assert after == draw(fresh, logits, [open_row(fresh, 0, sampling)], [1]).ids.item()


def listed_row(sampler: Sampler, row: int, what: str, ids: tuple[int, ...]):
    """A greedy row with a list: tokens that it may not take, by bias or because they would end it too early."""
    asked = {"logit_bias": dict.fromkeys(ids, -50.0)} if what == "biases" else {"min_tokens": 5}
    return open_row(sampler, row, SamplingParams(temperature=0.0, **asked), end_ids=ids if what == "ends" else ())


@pytest.mark.parametrize("what", ["biases", "ends"])
def test_a_short_list_beside_a_long_one_holds_nothing_of_who_had_its_row_before(what):
    sampler = Sampler(2, 160, CPU)
    logits = -torch.arange(160.0).expand(2, -1) / 100
    listed_row(sampler, 0, what, (5, 0, 1))
    sequences = [listed_row(sampler, 0, what, (9,)), listed_row(sampler, 1, what, (0, 1, 3))]
    assert draw(sampler, logits, sequences, [1, 1]).ids.tolist() == [0, 2]


@pytest.mark.parametrize(("mine", "expected"), [((9,), 0), ((0,), 1), ((0, 1), 2)])
@pytest.mark.parametrize("what", ["biases", "ends"])
def test_a_short_list_stays_what_it_is_when_a_longer_one_comes_later(what, mine, expected):
    """The lists of all rows are made wider then; what is new in them must say nothing, of token 0 neither."""
    sampler = Sampler(2, 160, CPU)
    logits = -torch.arange(160.0).expand(2, -1) / 100
    sequences = [listed_row(sampler, 0, what, mine), listed_row(sampler, 1, what, (0, 1, 3, 4))]
    assert draw(sampler, logits, sequences, [1, 1]).ids.tolist() == [expected, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_says_so_and_its_neighbours_do_not_notice(value):
    mixed = Mixed(1, 160, 8)
    together = mixed.drawn(list(range(8)), list(range(8)))
    sampler = Sampler(8, 160, CPU)
    sequences = [open_row(sampler, i, mixed.samplings[i], **mixed.rows[i]) for i in range(8)]
    for broken in range(8):
        logits = mixed.logits.clone()
        logits[broken, broken * 20] = value
        result = draw(sampler, logits, sequences, mixed.positions)
        assert result.broken.tolist() == [index == broken for index in range(8)]
        assert result.ids[broken] == 0
        sequences = [open_row(sampler, i, mixed.samplings[i], **mixed.rows[i]) for i in range(8)]
        for index in set(range(8)) - {broken}:
            assert (result.ids[index].item(), result.logprobs[index]) == together[index]


def test_logits_of_minus_infinity_alone_are_broken_and_among_others_banned():
    sampler = Sampler(2, 3, CPU)
    rows = [open_row(sampler, slot, SamplingParams(seed=slot)) for slot in range(2)]
    result = draw(sampler, torch.tensor([[-torch.inf] * 3, [-torch.inf, 0.0, -torch.inf]]), rows, [1, 1])
    assert (result.broken.tolist(), result.ids.tolist()) == ([True, False], [0, 1])


# -- distributions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5, "top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.1, "temperature": 1.7},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.4, "top_p": 0.95},
        {"logit_bias": {0: 2.0, 5: -3.0}, "min_tokens": 4, "top_k": 20, "top_p": 0.97, "min_p": 0.01},
    ],
    ids=lambda sampling: "+".join(sampling) or "plain",
)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_draws_follow_their_distribution(sampling, seed):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2
    row = {"prompt": (1, 3), "output": (3, 4, 4), "end_ids": (int(logits.argmax()),)}
    params = SamplingParams(seed=seed, **sampling)
    drawn = draw_many(logits.tolist(), params, 20_000, **row)
    assert_distributed(np.bincount(drawn, minlength=40), distribution(logits.numpy(), params, **row))


def test_draws_follow_their_distribution_over_seeds_too():
    logits = torch.randn(16, generator=torch.Generator().manual_seed(1)) * 2
    sampler = Sampler(3000, 16, CPU)
    rows = [open_row(sampler, seed, SamplingParams(seed=seed)) for seed in range(3000)]
    drawn = draw(sampler, logits.expand(3000, -1), rows, [1] * 3000).ids.numpy()
    assert_distributed(np.bincount(drawn, minlength=16), logits.softmax(-1).numpy())


def test_successive_tokens_are_independent():
    drawn = draw_many([0.0] * 8, SamplingParams(seed=12), 40_000)
    for lag in (1, 2, 16, 256):
        pairs = np.bincount(drawn[:-lag] * 8 + drawn[lag:], minlength=64)
        assert_distributed(pairs, np.full(64, 1 / 64))


def test_draws_from_a_large_vocabulary_follow_their_distribution():
    """Half of the mass is on 1,000 tokens, the rest spread evenly; looked at by range and by low bits of the id."""
    vocab_size = 151_936
    sampler = Sampler(1, vocab_size, CPU)
    sequence = open_row(sampler, 0, SamplingParams(seed=1))
    ids = np.arange(vocab_size)
    heavy = ids % 151 == 3
    weights = np.where(heavy, 0.5 / heavy.sum(), 0.5 / (~heavy).sum())
    logits = torch.tensor(weights).log().float().expand(16, -1)
    batches = [
        draw(sampler, logits, [sequence] * 16, range(start, start + 16)).ids.numpy() for start in range(1, 801, 16)
    ]
    drawn = np.concatenate(batches)
    for bins in (heavy.astype(int), ids * 8 // vocab_size, ids % 8):
        assert_distributed(np.bincount(bins[drawn], minlength=bins.max() + 1), np.bincount(bins, weights=weights))


# -- seeds ----------------------------------------------------------------------------------------------------------


def test_every_seed_has_noise_of_its_own():
    logits = [0.0] * 64
    replies = {seed: draw_many(logits, SamplingParams(seed=seed), 64).tolist() for seed in EDGE_SEEDS}
    for seed, reply in replies.items():
        assert draw_many(logits, SamplingParams(seed=seed), 64).tolist() == reply
        for other in EDGE_SEEDS:
            agreements = sum(left == right for left, right in zip(reply, replies[other], strict=True))
            assert agreements == 64 if other == seed else agreements < 8


def test_one_bit_of_the_seed_changes_the_reply():
    logits = [0.0] * 64
    base = draw_many(logits, SamplingParams(seed=0), 64).tolist()
    for bit in range(64):
        changed = draw_many(logits, SamplingParams(seed=1 << bit), 64).tolist()
        assert sum(left == right for left, right in zip(base, changed, strict=True)) < 8


def test_the_default_seed_is_a_digest_of_the_engines_seed_and_the_id():
    seeds = {default_seed(engine_seed, name) for engine_seed in (0, 1, 11, 2**64 - 1) for name in ("a", "b", "1a", "é")}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
    # Fixed for ever: a resumed reply goes on with it.
    assert default_seed(0, "a") == 15270482384145340437
    sampler = Sampler(1, 3, CPU)
    assert open_row(sampler, 0, SamplingParams(), name="a").seed == default_seed(0, "a")
    assert open_row(sampler, 0, SamplingParams(seed=0), name="a").seed == 0


# -- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_are_of_raw_logits_whatever_the_parameters():
    logits = torch.randn(1, 160, generator=torch.Generator().manual_seed(3)) * 2
    expected = logits[0].log_softmax(-1)
    generator = random.Random(0)
    for _ in range(30):
        sampling = random_sampling(generator)
        sampling = SamplingParams(
            **{name: getattr(sampling, name) for name in sampling.__struct_fields__} | {"logprobs": 5}
        )
        sampler = Sampler(1, 160, CPU)
        row = open_row(sampler, 0, sampling, prompt=[1, 2], output=[3], end_ids=[int(expected.argmax())])
        result = draw(sampler, logits, [row], [3])
        token, logprob, top = result.logprobs[0]
        assert token == result.ids.item()
        assert logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert [pair[0] for pair in top] == expected.topk(5).indices.tolist()
        assert [pair[1] for pair in top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("lowest", [-float("inf"), -3e38, -20_000.0])
def test_what_json_cannot_say_is_minus_9999(lowest):
    logits = torch.full((2, 30), lowest)
    logits[:, 4] = 0.0
    scored = token_logprobs(logits, torch.tensor([4, 7]), 20)
    assert json.loads(json.dumps(scored, allow_nan=False))[0][:2] == [4, 0.0]
    assert scored[1][:2] == (7, -9999.0)
    assert [pair[1] for pair in scored[0][2]] == [0.0] + [-9999.0] * 19


def test_more_logprobs_than_tokens_list_the_whole_vocabulary():
    ((token, _, top),) = token_logprobs(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0]), 20)
    assert (token, [pair[0] for pair in top]) == (0, [2, 1, 0])
    assert token_logprobs(torch.zeros(1, 3), torch.tensor([2]), 0)[0][2] == []
