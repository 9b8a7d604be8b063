"""A sampler on its own, and the definition in NumPy that it is held against."""

from collections.abc import Sequence as Ordered

import numpy as np
import torch
from torch import Tensor

from engine import Engine, Request, SamplingParams
from engine.sampler import Drawn, Sampler
from engine.sequence import Sequence
from kernels import gumbel, row_keys

CPU = torch.device("cpu")


def open_row(
    sampler: Sampler,
    row: int,
    sampling: SamplingParams,
    prompt: Ordered[int] = (1,),
    output: Ordered[int] = (),
    end_ids: Ordered[int] = (),
    name: str = "r",
) -> Sequence:
    """A sequence in a row of the sampler, with its next token about to be drawn."""
    asked = Request(id=name, tokens=list(prompt), output=list(output), sampling=sampling)
    sequence = Sequence(asked, limit=10**6, end_ids=frozenset(end_ids), namespace=(), engine_seed=0)
    sequence.row, sequence.pending = row, 1
    sampler.open(sequence)
    return sequence


def draw(sampler: Sampler, logits: Tensor, sequences: list[Sequence], positions: Ordered[int] | Tensor) -> Drawn:
    """One draw that leaves `logits` as they were."""
    with torch.inference_mode():
        return sampler.draw(logits.clone(), sequences, torch.as_tensor(positions))


def draw_many(logits: Ordered[float], sampling: SamplingParams, count: int, **row: Ordered[int]) -> np.ndarray:
    """Tokens that one request would draw from the same logits at the positions 0 … count - 1."""
    sampler = Sampler(1, len(logits), CPU)
    sequence = open_row(sampler, 0, sampling, **row)
    rows = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    return draw(sampler, rows, [sequence] * count, range(count)).ids.numpy()


def distribution(
    logits: np.ndarray,
    sampling: SamplingParams,
    prompt: Ordered[int] = (1,),
    output: Ordered[int] = (),
    end_ids: Ordered[int] = (),
) -> np.ndarray:
    """What each token's probability is, by definition."""
    scores, counts = logits.astype(np.float64), np.bincount(np.array(output, int), minlength=len(logits))
    seen = np.union1d(prompt, output).astype(int)
    scores[seen] = np.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)[
        seen
    ]
    scores -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if len(output) < sampling.min_tokens:
        scores[list(end_ids)] = -np.inf
    scores = (scores - scores.max()) / max(sampling.temperature, 1e-9)
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.sort(scores)[-sampling.top_k]] = -np.inf
    p = np.exp(scores) / np.exp(scores).sum()
    if sampling.top_p < 1:
        p[[p[p > own].sum() >= sampling.top_p for own in p]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


def defined_token(
    logits: np.ndarray, sampling: SamplingParams, seed: int, position: int, **row: Ordered[int]
) -> int | None:
    """The token that the definition draws with the counter's noise; None where rounding could decide it otherwise."""
    noise = noise_row(seed, position, len(logits))
    found: set[int] = set()
    for shift in (0.0, 1e-4, -1e-4):
        tilted = logits + shift * np.cos(np.arange(len(logits)))
        with np.errstate(divide="ignore"):
            found.add(int((np.log(distribution(tilted, sampling, **row)) + noise).argmax()))
    return found.pop() if len(found) == 1 else None


def noise_row(seed: int, position: int, vocab_size: int) -> np.ndarray:
    wrapped = seed - 2**64 if seed >= 2**63 else seed
    keys = row_keys(torch.tensor([wrapped]), torch.tensor([position]))
    return gumbel(keys, torch.arange(vocab_size))[0].numpy().astype(np.float64)


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square (Pearson 1900) of counts against probabilities; what has no probability must not occur at all."""
    assert counts[probabilities == 0].sum() == 0, "a token with probability 0 was drawn"
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed, expected = [
        np.append(values[~rare], values[rare].sum() if values[rare].sum() >= 5 else []) for values in (counts, expected)
    ]
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum() if freedom else 0.0
    assert statistic < freedom + 5 * np.sqrt(2 * max(freedom, 1)), f"chi-square {statistic:.1f} for {freedom} degrees"


def fix_logits(engine: Engine, row: Ordered[float]) -> None:
    """From now on the model answers these logits at every position, whatever the tokens."""
    fixed = torch.tensor(row, dtype=torch.float32)
    engine.runner.logits = lambda hidden: fixed.expand(len(hidden), -1).clone()
