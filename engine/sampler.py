"""From logits to tokens, vectorised over a mixed batch. A row's token depends on its own request and nothing else.

Order: penalties, bias, the min_tokens mask, then greedy rows take the argmax; the others go through temperature, top-k,
top-p and min-p, and take the argmax of scores plus counter-based Gumbel noise (Gumbel-max, Maddison et al. 2014).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import SamplingParams, TokenLogprob
from engine.sequence import Sequence
from kernels import gumbel, row_keys

LOWEST_LOGPROB = -9999.0  # stands for -inf, which JSON cannot say
FEW = 1024  # up to so many candidates, picking them out costs less than noise for the whole vocabulary
NUCLEUS_GUESS = 1024  # most nuclei are within this many tokens; larger ones take a full sort of their row
FLOAT_MAX = torch.finfo(torch.float32).max
_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(slots=True)
class Drawn:
    """One token per row, on the device: ids [B] (0 where broken), broken [B]; logprobs of the rows that want them."""

    ids: Tensor
    broken: Tensor
    logprobs: list[TokenLogprob | None]


class Sampler:
    """Sampling parameters and penalty counts live on the device, in the rows of running sequences."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self._device, self._rows = device, rows
        self._float = {name: torch.zeros(rows, device=device) for name in _FLOATS}
        self._top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._in_prompt: Tensor | None = None  # bool [rows, vocabulary], made when the first penalty comes
        self._output_counts: Tensor | None = None  # int32 [rows, vocabulary]

    def open(self, sequence: Sequence) -> None:
        """Set up the row of a sequence that was admitted."""
        row, sampling = sequence.row, sequence.request.sampling
        for name in _FLOATS:
            self._float[name][row] = min(getattr(sampling, name), FLOAT_MAX)
        vocab_size = len(self._vocab)
        self._top_k[row] = sampling.top_k if 0 < sampling.top_k < vocab_size else vocab_size
        self._seed[row] = sequence.seed - 2**64 if sequence.seed >= 2**63 else sequence.seed
        if has_penalty(sampling):
            self._count_tokens(sequence)

    def draw(self, logits: Tensor, sequences: list[Sequence], positions: Tensor) -> Drawn:
        """Tokens for logits [B, vocabulary] (float32, may be changed); positions [B] are those of the new tokens."""
        rows = torch.tensor([sequence.row for sequence in sequences], device=self._device)
        broken = ~torch.isfinite(logits.amax(-1))
        logits = logits.masked_fill_(broken[:, None], 0.0)
        raw = {i: logits[i].clone() for i, s in enumerate(sequences) if s.request.sampling.logprobs is not None}
        scores = self._adjust(logits, sequences, rows)
        ids = scores.argmax(-1)
        drawn = [index for index, sequence in enumerate(sequences) if not sequence.greedy]
        if drawn:
            chosen = torch.tensor(drawn, device=self._device)
            ids[chosen] = self._draw_random(scores[chosen], rows[chosen], positions[chosen], sequences, drawn)
        ids.masked_fill_(broken, 0)
        self._count_new(ids, sequences, rows)
        return Drawn(ids, broken, self._logprobs(raw, ids, sequences))

    # -- adjusting the logits -------------------------------------------------------------------------------------

    def _adjust(self, scores: Tensor, sequences: list[Sequence], rows: Tensor) -> Tensor:
        penalised = [index for index, s in enumerate(sequences) if has_penalty(s.request.sampling)]
        if penalised:
            chosen = torch.tensor(penalised, device=self._device)
            scores[chosen] = self._penalise(scores[chosen], rows[chosen])
        for index, sequence in enumerate(sequences):
            sampling = sequence.request.sampling
            if sampling.logit_bias:
                ids = torch.tensor(list(sampling.logit_bias), device=self._device)
                scores[index, ids] += torch.tensor(list(sampling.logit_bias.values()), device=self._device)
            if sequence.length - sequence.prompt_length <= sampling.min_tokens:
                ends = [token for token in sequence.end_ids if token < len(self._vocab)]  # files may name ids beyond it
                scores[index, torch.tensor(ends, dtype=torch.int64, device=self._device)] = -torch.inf
        return scores

    def _penalise(self, scores: Tensor, rows: Tensor) -> Tensor:
        assert self._in_prompt is not None
        assert self._output_counts is not None
        counts = self._output_counts[rows]
        repetition, presence, frequency = (
            self._float[name][rows, None] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        )
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(self._in_prompt[rows] | (counts > 0), repeated, scores)
        return scores - frequency * counts - presence * (counts > 0)

    # -- drawing --------------------------------------------------------------------------------------------------

    def _draw_random(
        self, scores: Tensor, rows: Tensor, positions: Tensor, sequences: list[Sequence], drawn: list[int]
    ) -> Tensor:
        scores = scores.clamp(max=FLOAT_MAX)  # a bias or a penalty may have brought infinity
        scores = (scores - scores.amax(-1, keepdim=True)) / self._float["temperature"][rows, None]
        keys = row_keys(self._seed[rows], positions)
        filtered = [has_filter(sequences[index].request.sampling) for index in drawn]
        ids = torch.empty(len(drawn), dtype=torch.int64, device=self._device)
        for kind in {*filtered}:
            chosen = torch.tensor([i for i, f in enumerate(filtered) if f is kind], device=self._device)
            part = self._filter(scores[chosen], rows[chosen]) if kind else scores[chosen]
            ids[chosen] = draw_gumbel(part, keys[chosen], self._vocab, few=kind)
        return ids

    def _filter(self, scores: Tensor, rows: Tensor) -> Tensor:
        """-inf for what top-k, top-p and min-p exclude, in this order. Ties with the last one kept are kept."""
        top_k, top_p, min_p = self._top_k[rows], self._float["top_p"][rows], self._float["min_p"][rows]
        limited = top_k < scores.shape[1]
        if bool(limited.any()):
            most = int(top_k.where(limited, 1).max())
            last = scores.topk(most).values.gather(1, top_k.clamp(max=most)[:, None] - 1)
            scores = scores.masked_fill((scores < last) & limited[:, None], -torch.inf)
        if bool((top_p < 1).any()):
            floor = nucleus_floor(scores, top_p).masked_fill(top_p >= 1, -torch.inf)
            scores = scores.masked_fill(scores < floor[:, None], -torch.inf)
        return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + min_p.log()[:, None], -torch.inf)

    # -- counting and reporting -----------------------------------------------------------------------------------

    def _count_tokens(self, sequence: Sequence) -> None:
        if self._in_prompt is None or self._output_counts is None:
            shape = (self._rows, len(self._vocab))
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        prompt = torch.tensor(sequence.tokens[: sequence.prompt_length], device=self._device)
        output = torch.tensor(sequence.tokens[sequence.prompt_length :], dtype=torch.int64, device=self._device)
        self._in_prompt[sequence.row] = False
        self._in_prompt[sequence.row, prompt.long()] = True
        self._output_counts[sequence.row] = torch.bincount(output, minlength=len(self._vocab))

    def _count_new(self, ids: Tensor, sequences: list[Sequence], rows: Tensor) -> None:
        counted = [index for index, s in enumerate(sequences) if has_penalty(s.request.sampling)]
        if counted and self._output_counts is not None:
            chosen = torch.tensor(counted, device=self._device)
            self._output_counts[rows[chosen], ids[chosen]] += 1

    @staticmethod
    def _logprobs(raw: dict[int, Tensor], ids: Tensor, sequences: list[Sequence]) -> list[TokenLogprob | None]:
        logprobs: list[TokenLogprob | None] = [None] * len(sequences)
        for index, logits in raw.items():
            count = sequences[index].request.sampling.logprobs or 0
            logprobs[index] = token_logprobs(logits[None], ids[index : index + 1], count)[0]
        return logprobs


def draw_gumbel(scores: Tensor, keys: Tensor, vocab: Tensor, *, few: bool) -> Tensor:
    """The argmax of scores [B, vocabulary] plus noise, [B]. `few`: most scores are -inf; only the others get noise."""
    most = int(torch.isfinite(scores).sum(-1).max()) if few else scores.shape[1]
    if most > FEW:
        return (scores + gumbel(keys, vocab)).argmax(-1)
    candidates = (
        scores.topk(most).indices.sort(-1).values
    )  # in order of their ids, so that ties go to the lowest here too
    winner = (scores.gather(1, candidates) + gumbel(keys, candidates)).argmax(-1, keepdim=True)
    return candidates.gather(1, winner).squeeze(1)


def has_penalty(sampling: SamplingParams) -> bool:
    return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)


def has_filter(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def nucleus_floor(scores: Tensor, top_p: Tensor) -> Tensor:
    """The lowest score [B] in each row's nucleus: the fewest most likely tokens whose probabilities reach top_p [B]."""
    log_probabilities = scores.log_softmax(-1)
    count = min(NUCLEUS_GUESS, scores.shape[1])
    best, order = log_probabilities.topk(count)
    if count < scores.shape[1] and bool((best.exp().cumsum(-1)[:, -1] < top_p).any()):
        best, order = log_probabilities.sort(dim=-1, descending=True)
    probabilities = best.exp()
    before = probabilities.cumsum(-1) - probabilities
    last = (before < top_p[:, None]).sum(-1, keepdim=True).clamp_(min=1) - 1
    return scores.gather(1, order.gather(1, last)).squeeze(1)


def token_logprobs(logits: Tensor, ids: Tensor, count: int) -> list[TokenLogprob]:
    """Log-softmax of raw logits [B, vocabulary] at ids [B], with the `count` best ones; -inf as LOWEST_LOGPROB."""
    logprobs = logits.log_softmax(-1).clamp_(min=LOWEST_LOGPROB)
    own = logprobs.gather(1, ids[:, None]).squeeze(1).tolist()
    best = logprobs.topk(min(count, logprobs.shape[1]))
    tops = [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return list(zip(ids.tolist(), own, tops, strict=True))
