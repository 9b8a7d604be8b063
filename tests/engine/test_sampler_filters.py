"""What the filters keep, and by which way: narrow or whole, head or search, all give the same tokens."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine import SamplingParams, sampler
from engine.sampler import Sampler
from engine.sampling import adjust, filters
from engine.sampling import draw as drawing
from engine.sampling.draw import draw_whole
from engine.sampling.filters import nucleus_floor, top_k_floor
from engine.sampling.rows import Rows
from kernels import block_maxima, gumbel, row_keys
from tests.engine.sampling import CPU, draw, open_row
from tests.engine.test_sampler import random_sampling

WORDS = 151_936


def scores_of(kind: str, size: int, seed: int = 0) -> Tensor:
    """One row of scores, the best 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = {
        "normal": lambda: torch.randn(1, size, generator=generator) * 3,
        "flat": lambda: torch.randn(1, size, generator=generator) / 8,
        "peaked": lambda: -1.5 * (torch.randperm(size, generator=generator)[None] + 1.0).log(),
        "tied": lambda: torch.randint(-40, 1, (1, size), generator=generator) / 8,
        "equal": lambda: torch.zeros(1, size),
        "two": lambda: torch.tensor([0.0, -1.0]).repeat(size)[None, :size],
        "banned": lambda: torch.randn(1, size, generator=generator).masked_fill_(
            torch.arange(size) % 3 > 0, -torch.inf
        ),
        "far": lambda: torch.randn(1, size, generator=generator) * 1e4,
    }[kind]()
    return logits - logits.amax(-1, keepdim=True)


KINDS = ["normal", "flat", "peaked", "tied", "equal", "two", "banned", "far"]
PORTIONS = [1e-300, 1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 2**-40, 1 - 2**-53]


def defined_floor(scores: Tensor, top_p: float) -> float:
    """The lowest score kept, by the definition in words: whole-number weights, scores in falling order."""
    weights = (scores[0].exp() * 2**35).floor().to(torch.int64).tolist()
    kept, above = 0.0, 0
    for score, group in itertools.groupby(sorted(zip(scores[0].tolist(), weights, strict=True))[::-1], lambda x: x[0]):
        if above >= top_p * sum(weights):
            return kept
        kept, above = score, above + sum(weight for _, weight in group)
    return kept


@pytest.mark.parametrize("size", [1, 2, 300, 5003])
@pytest.mark.parametrize("kind", KINDS)
def test_a_nucleus_ends_where_its_definition_says_by_head_and_by_search(kind, size):
    for seed, top_p in enumerate(PORTIONS if size < 5000 else PORTIONS[1::2]):
        scores = scores_of(kind, size, seed)
        portion, maxima = torch.tensor([top_p], dtype=torch.float64), block_maxima(scores)
        weighed = filters._weights(scores)
        target = weighed.sum(-1, dtype=torch.float64) * portion
        defined = defined_floor(scores, top_p)
        assert nucleus_floor(scores, maxima, portion).item() == defined
        assert filters._search(scores, weighed, target).item() == defined


@pytest.mark.parametrize("kind", ["flat", "peaked", "normal"])
def test_weights_are_whole_numbers_so_that_sums_are_exact_in_any_order(kind):
    weighed = filters._weights(scores_of(kind, WORDS))[0]
    assert torch.equal(weighed, weighed.floor())
    assert weighed.max().item() == 2**35
    exact = sum(map(int, weighed.tolist()))
    assert exact < 2**53
    for order in (weighed, weighed.flip(0), weighed.sort().values):
        assert int(order.sum(dtype=torch.float64)) == int(order.cumsum(0, dtype=torch.float64)[-1]) == exact


@pytest.mark.parametrize("size", [3, 65, 1000])
def test_a_nucleus_at_its_very_edge_is_exact(size):
    """One token of weight 1 and two of weight 1/2: the first alone is exactly half, and a bit more needs the others."""
    half = next(x for x in np.linspace(-0.6931473, -0.6931471, 50, dtype=np.float32) if torch.tensor(x).exp() == 0.5)
    scores = torch.full((1, size), -torch.inf)
    scores[0, 0], scores[0, size // 2], scores[0, -1] = 0.0, float(half), float(half)
    for top_p, floor in ((0.5, 0.0), (float(np.nextafter(0.5, 1)), float(half))):
        portion = torch.tensor([top_p], dtype=torch.float64)
        weighed = filters._weights(scores)
        assert nucleus_floor(scores, block_maxima(scores), portion).item() == floor
        assert filters._search(scores, weighed, weighed.sum(-1, dtype=torch.float64) * portion).item() == floor


@pytest.mark.parametrize("kind", ["flat", "peaked", "tied"])
def test_nuclei_of_a_large_vocabulary_do_not_depend_on_the_batch(kind):
    rows = torch.cat([scores_of(kind, WORDS, seed) for seed in range(5)])
    portions = torch.tensor([0.3, 0.9, 0.95, 0.999, 0.5], dtype=torch.float64)
    together = nucleus_floor(rows, block_maxima(rows), portions)
    for row in range(5):
        alone = rows[row : row + 1].clone()
        assert nucleus_floor(alone, block_maxima(alone), portions[row : row + 1]).item() == together[row].item()
        exact = alone[0].double().exp()
        assert (exact[alone[0] >= together[row]].sum() / exact.sum()).item() > portions[row].item() - 1e-5
        assert (exact[alone[0] > together[row]].sum() / exact.sum()).item() < portions[row].item() + 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_ends_at_the_kth_score(kind):
    rows = torch.cat([scores_of(kind, 5003, seed) for seed in range(6)])
    top_k = torch.tensor([1, 2, 50, 64, 700, 5002])
    floors = top_k_floor(rows, block_maxima(rows), top_k, 5002)
    assert floors.tolist() == [np.sort(row)[-k] for row, k in zip(rows.numpy(), top_k.tolist(), strict=True)]


@pytest.mark.parametrize("kind", [*KINDS[:6], "banned"])
@pytest.mark.parametrize("size", [2, 64, 300, 5003, WORDS])
def test_finalists_win_as_the_whole_vocabulary_would(kind, size):
    """The cheap pass over the vocabulary against the definition: noise for every token, the lowest id of equals."""
    count = 6 if size == WORDS else 40
    scores = scores_of(kind, size).repeat(count, 1)
    keys = row_keys(torch.arange(count) * 77, torch.arange(count))
    ids = torch.arange(size, dtype=torch.int32)
    drawn = draw_whole(scores, keys, ids)
    totals = scores + gumbel(keys, ids)
    assert torch.equal(drawn, totals.argmax(-1))
    for row in range(count):
        assert draw_whole(scores[row : row + 1], keys[row : row + 1], ids).item() == drawn[row].item()


def batch_of(seed: int, vocab_size: int, count: int) -> tuple[list[SamplingParams], Tensor]:
    generator = random.Random(seed)
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[::3] = (logits[::3] * 2).round() / 2  # ties, as bfloat16 makes them
    return [random_sampling(generator) for _ in range(count)], logits


def ids_of(samplings: list[SamplingParams], logits: Tensor) -> list[int]:
    own = Sampler(len(samplings), logits.shape[1], CPU)
    rows = [open_row(own, slot, asked, prompt=(1, 2, 3), output=(4, 5)) for slot, asked in enumerate(samplings)]
    return draw(own, logits, rows, [5] * len(rows)).ids.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        [(drawing, "NARROW", 10**9)],
        [(drawing, "NARROW", 0)],
        [(filters, "HEAD", 1)],
        [(drawing, "FINALISTS", 200)],
        [(drawing, "TILE", 1 << 20), (sampler, "GROUP", 1 << 30)],
        [(sampler, "GROUP", 1)],
        [(filters, "SEARCHED", 1), (filters, "HEAD", 1)],
    ],
    ids=["whole", "narrow", "search", "finalists", "one tile", "row by row", "search row by row"],
)
def test_every_way_through_the_sampler_draws_the_same_tokens(monkeypatch, changes):
    for vocab_size in (300, 9000):
        samplings, logits = batch_of(vocab_size, vocab_size, 48)
        usual = ids_of(samplings, logits)
        with monkeypatch.context() as patch:
            for module, name, value in changes:
                patch.setattr(module, name, value)
            assert ids_of(samplings, logits) == usual


# -- what it costs --------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Notes the shapes that sorts and topks work on."""

    def __init__(self) -> None:
        super().__init__()
        self.sorted: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.sort, torch.ops.aten.topk, torch.ops.aten.kthvalue):
            self.sorted.append(args[0].shape[-1])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["flat", "peaked"])
def test_no_vocabulary_is_sorted(kind):
    own = Sampler(2, WORDS, CPU)
    asked = SamplingParams(top_k=100, top_p=0.95, min_p=0.001, logprobs=20, repetition_penalty=1.1)
    rows = [open_row(own, 0, asked), open_row(own, 1, SamplingParams(top_p=0.95))]
    with Operations() as noted:
        draw(own, scores_of(kind, WORDS).repeat(2, 1), rows, [2, 2])
    assert noted.sorted
    assert max(noted.sorted) < WORDS // 8


def test_nothing_waits_for_the_device():
    """Meta tensors have no content: whatever would bring a number to the host raises."""
    device = torch.device("meta")
    own = Sampler(40, 9000, device)
    samplings, logits = batch_of(1, 9000, 40)
    rows = [open_row(own, slot, asked, end_ids=(5, 6)) for slot, asked in enumerate(samplings)]
    with torch.inference_mode():
        drawn = own.draw(logits.to(device), rows, torch.arange(40, device=device))
    assert (drawn.ids.shape, drawn.broken.shape) == ((40,), (40,))
    assert drawn.scored is not None


def test_a_greedy_batch_takes_the_argmax_and_nothing_else(monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("a greedy batch needs none of this")

    for module, name in (
        (sampler, "draw_pool"),
        (sampler, "row_keys"),
        (sampler, "score_tokens"),
        (adjust, "_rewrite"),
    ):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(Rows, "numbers", never)
    own = Sampler(3, 300, CPU)
    rows = [open_row(own, slot, SamplingParams(temperature=0.0)) for slot in range(3)]
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    assert draw(own, logits, rows, [1, 2, 3]).ids.tolist() == logits.argmax(-1).tolist()
    assert own._rows.history is None
