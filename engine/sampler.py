"""From logits to tokens, vectorised over a mixed batch. A row's token depends on its own request and nothing else.

Order: penalties, bias, the min_tokens mask and other masks (engine.sampling.adjust), then greedy rows take the argmax;
the others go through temperature, top-k, top-p and min-p (filters) and draw with noise (draw). Log-probabilities are
those of the raw logits (logprobs). What a batch does not use costs it nothing, and nothing waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from engine.request import TokenLogprob
from engine.sampling.adjust import adjust
from engine.sampling.draw import Pool, draw_pool
from engine.sampling.logprobs import Scored, score_tokens, token_logprobs
from engine.sampling.rows import Rows, Trait
from engine.sequence import Sequence
from kernels import best, download, row_keys, upload

__all__ = ["Drawn", "Sampler", "token_logprobs"]

Best = Callable[[Tensor], tuple[Tensor, Tensor]]
GROUP = 1 << 20  # numbers of a CPU's pass over several rows: more would leave its last cache between passes


@dataclass(slots=True)
class Drawn:
    """One token per row, on the device: ids [B] (0 where broken), broken [B]; log-probabilities of some rows."""

    ids: Tensor
    broken: Tensor
    scored: Scored | None = None
    scored_rows: tuple[int, ...] = ()

    def download(self) -> "Drawn":
        """The same on its way to the host."""
        scored = None if self.scored is None else self.scored.download()
        return Drawn(download(self.ids), download(self.broken), scored, self.scored_rows)

    @property
    def logprobs(self) -> list[TokenLogprob | None]:
        """On the host, row by row, None where not asked for; waits for the device."""
        logprobs: list[TokenLogprob | None] = [None] * len(self.ids)
        if self.scored is not None:
            for row, logprob in zip(self.scored_rows, self.scored.rows(), strict=True):
                logprobs[row] = logprob
        return logprobs


class Sampler:
    """Sampling parameters and what penalties count live on the device, in the rows of running sequences."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device, best: Best = best) -> None:
        """`best` finds the largest logits as kernels.top.best does."""
        self._best = best
        self._vocab = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self._rows = Rows(rows, vocab_size, device)
        self._device = device

    def open(self, sequence: Sequence) -> None:
        """Set up the row of a sequence that was admitted."""
        self._rows.open(sequence)

    def draw(self, logits: Tensor, sequences: list[Sequence], positions: Tensor) -> Drawn:
        """Tokens for logits [B, vocabulary] (float32, may be changed); positions [B] are those of the new tokens."""
        traits = [self._rows.traits[sequence.row] for sequence in sequences]
        used = reduce(or_, traits, Trait(0))
        maxima, ids = self._best(logits)
        broken = ~torch.isfinite(maxima.amax(-1))
        wanted = [i for i, trait in enumerate(traits) if trait & Trait.LOGPROBS]
        raw = logits[self._tensor(wanted)] if wanted else None  # a copy: what follows changes the logits
        if adjust(logits, sequences, traits, self._rows):
            maxima, ids = self._best(logits)
            broken |= maxima.amax(-1) == -torch.inf  # nothing is allowed
        if used & Trait.RANDOM:
            self._draw_random(logits, maxima, sequences, traits, positions, ids)
        ids.masked_fill_(broken, 0)
        if used & Trait.PENALTY:
            self._remember(ids, sequences, traits)
        if raw is None:
            return Drawn(ids, broken)
        counts = [sequences[i].request.sampling.logprobs or 0 for i in wanted]
        return Drawn(ids, broken, score_tokens(raw, ids[self._tensor(wanted)], counts), tuple(wanted))

    def _draw_random(
        self,
        logits: Tensor,
        maxima: Tensor,
        sequences: list[Sequence],
        traits: list[Trait],
        positions: Tensor,
        ids: Tensor,
    ) -> None:
        """Write the tokens of the rows that are not greedy to ids [B]; rows with the same filters go together."""
        kinds: dict[Trait, list[int]] = {}
        for index, trait in enumerate(traits):
            if trait & Trait.RANDOM:
                kinds.setdefault(trait & Trait.FILTER, []).append(index)
        most = max(1, GROUP // logits.shape[1]) if logits.is_cpu else len(sequences)
        for filters, members in kinds.items():
            for start in range(0, len(members), most):
                chosen = members[start : start + most]
                pool = self._pool(logits, maxima, self._tensor(chosen), [sequences[i].row for i in chosen], positions)
                top_k = max(sequences[i].request.sampling.top_k for i in chosen)
                draw_pool(pool, filters, self._rows, top_k, self._vocab, ids)

    def _pool(self, logits: Tensor, maxima: Tensor, places: Tensor, rows: list[int], positions: Tensor) -> Pool:
        """Scores: how far each logit is below the best, in units of the temperature."""
        index = self._tensor(rows)
        maxima = maxima[places]
        best = maxima.amax(-1, keepdim=True)
        temperature = self._rows.numbers(index, "temperature")[0].to(torch.float32)[:, None]
        scores = (logits[places] if len(places) < len(logits) else logits).sub(best).div_(temperature)
        keys = row_keys(self._rows.seeds[index], positions[places])
        return Pool(places, index, keys, scores, (maxima - best).div_(temperature))

    def _remember(self, ids: Tensor, sequences: list[Sequence], traits: list[Trait]) -> None:
        assert self._rows.history is not None
        chosen = [i for i, trait in enumerate(traits) if trait & Trait.PENALTY]
        lengths = [sequences[i].length - 1 for i in chosen]
        rows = self._tensor([sequences[i].row for i in chosen])
        self._rows.history.append(rows, lengths, ids[self._tensor(chosen)])

    def _tensor(self, values: list[int]) -> Tensor:
        return upload(values, self._device)
