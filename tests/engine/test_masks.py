"""The seam for constrained output: a mask per row, asked for when the token before it is known."""

from array import array

import pytest
import torch

from engine import Engine, FinishReason, SamplingParams
from engine.masks import pack
from engine.sampler import Sampler
from engine.sampling.adjust import unpack
from tests.engine.driving import Reply, request, run
from tests.engine.sampling import CPU, draw, draw_many, fix_logits, open_row

VOCAB = 160
EVEN = pack(range(0, VOCAB, 2), VOCAB)


class Alternating:
    """Even ids at even places of the output, odd ones at odd places; notes what it was told and asked."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self._masks = [pack(range(parity, vocab_size, 2), vocab_size) for parity in (0, 1)]
        self.calls: list[str | int] = []
        self.place = 0

    def advance(self, token: int) -> None:
        assert token % 2 == self.place % 2
        self.place += 1
        self.calls.append(token)

    def mask(self) -> array:
        self.calls.append("mask")
        return self._masks[self.place % 2]


class Fixed:
    """The same mask at every place."""

    def __init__(self, bits: array | None) -> None:
        self._bits = bits

    def advance(self, token: int) -> None:
        pass

    def mask(self) -> array | None:
        return self._bits


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 160, 1000])
def test_packed_bits_say_what_is_allowed(vocab_size):
    allowed = {token for token in range(vocab_size) if token % 7 in (0, 3, 6)} | {vocab_size - 1}
    bits = pack(allowed, vocab_size)
    assert (len(bits), bits.itemsize) == (-(-vocab_size // 32), 4)
    unpacked = unpack(torch.frombuffer(bits, dtype=torch.int32), vocab_size)
    assert set(unpacked.nonzero().flatten().tolist()) == allowed
    assert len(unpacked) == vocab_size


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"logit_bias": {1: 50.0}, "temperature": 0.0},
    ],
    ids=lambda params: "+".join(params) or "plain",
)
def test_only_allowed_tokens_are_drawn_and_filters_see_only_them(params):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    sampling = SamplingParams(seed=3, **params)
    sampler = Sampler(1, VOCAB, CPU)
    sequence = open_row(sampler, 0, sampling)
    sequence.mask_source = Fixed(EVEN)
    masked = draw(sampler, logits.expand(300, -1), [sequence] * 300, range(300)).ids
    assert bool((masked % 2 == 0).all())
    banned = logits.clone()
    banned[1::2] = -torch.inf
    without_bias = SamplingParams(seed=3, **{name: value for name, value in params.items() if name != "logit_bias"})
    assert masked.tolist() == draw_many(banned.tolist(), without_bias, 300).tolist()


def test_a_mask_touches_its_own_row_only_and_none_allows_all():
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 9.0
    sampler = Sampler(3, VOCAB, CPU)
    rows = [open_row(sampler, slot, SamplingParams(temperature=0.0, logprobs=1)) for slot in range(3)]
    rows[1].mask_source, rows[2].mask_source = Fixed(EVEN), Fixed(None)
    drawn = draw(sampler, logits, rows, [1, 1, 1])
    assert drawn.ids.tolist() == [7, 0, 7]
    assert [row[2][0][0] for row in drawn.logprobs] == [7, 7, 7]  # of raw logits


def masked_run(engine: Engine, sources: dict[str, object], others: list = ()) -> dict[str, Reply]:
    """Requests with sources beside others without; sources are set as the engine's own code will set them."""
    jobs = [request(name, [3, 4, 5], SamplingParams(max_tokens=9, seed=1, ignore_eos=True)) for name in sources]
    for job in jobs:
        engine.add(job)
        engine._sequences[job.id].mask_source = sources[job.id]
    return run(engine, others)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_source_is_told_each_token_before_it_is_asked_for_the_next_mask(make_engine, overlap):
    source = Alternating()
    neighbour = request("n", [5, 6], SamplingParams(max_tokens=12, seed=2, ignore_eos=True))
    alone = run(make_engine(), [neighbour])["n"].tokens
    replies = masked_run(make_engine(overlap=overlap), {"x": source}, [neighbour])
    tokens = replies["x"].tokens
    assert [token % 2 for token in tokens] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert source.calls == [call for token in tokens for call in ("mask", token)]
    assert replies["n"].tokens == alone


def test_masked_replies_are_the_same_with_overlap_and_after_preemption(make_engine):
    plain = masked_run(make_engine(), {"x": Alternating()})["x"].tokens
    assert masked_run(make_engine(overlap=True), {"x": Alternating()})["x"].tokens == plain
    rival = request("rival", range(30, 85), SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True))
    engine = make_engine(kv_blocks=17)
    engine.add(rival)
    replies = masked_run(engine, {"x": Alternating()})
    assert replies["x"].usage.preemptions > 0
    assert replies["x"].tokens == plain


def test_a_mask_that_allows_nothing_ends_its_request_alone(make_engine):
    engine = make_engine()
    fix_logits(engine, [0.0] * VOCAB)
    replies = masked_run(engine, {"x": Fixed(pack([], VOCAB)), "y": Fixed(EVEN)})
    assert replies["x"].finish_reason is FinishReason.ERROR
    assert "its mask allows nothing" in replies["x"].error
    assert replies["y"].finish_reason is FinishReason.LENGTH
