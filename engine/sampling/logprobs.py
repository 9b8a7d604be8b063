"""Log-probabilities: the log-softmax of the model's raw logits, whatever else was done to them."""

from dataclasses import dataclass

from torch import Tensor

from engine.request import TokenLogprob
from kernels import block_maxima, download, top_columns

LOWEST_LOGPROB = -9999.0  # stands for -inf, which JSON cannot say


@dataclass(slots=True)
class Scored:
    """Log-probabilities of n tokens and of the best of their rows, still on the device."""

    ids: Tensor  # [n]
    own: Tensor  # [n]
    best_ids: Tensor  # [n, most], the likeliest first, of equals the lowest id
    best: Tensor  # [n, most]
    counts: list[int]  # how many of the best each of them wants

    def download(self) -> "Scored":
        """The same on its way to the host."""
        ids, own, best_ids, best = map(download, (self.ids, self.own, self.best_ids, self.best))
        return Scored(ids, own, best_ids, best, self.counts)

    def rows(self) -> list[TokenLogprob]:
        """On the host; waits for the device."""
        best = zip(self.best_ids.tolist(), self.best.tolist(), self.counts, strict=True)
        tops = [list(zip(ids[:count], values[:count], strict=True)) for ids, values, count in best]
        return list(zip(self.ids.tolist(), self.own.tolist(), tops, strict=True))


def score_tokens(logits: Tensor, ids: Tensor, counts: list[int]) -> Scored:
    """Score tokens ids [n] under raw logits [n, vocabulary], with as many best ones as `counts` says."""
    most = min(max(counts, default=0), logits.shape[1])
    columns = top_columns(logits, block_maxima(logits), most)
    logprobs = logits.log_softmax(-1)
    own, best = (logprobs.gather(1, at).clamp_(min=LOWEST_LOGPROB) for at in (ids[:, None], columns))
    return Scored(ids, own.squeeze(1), columns, best, counts)


def token_logprobs(logits: Tensor, ids: Tensor, count: int) -> list[TokenLogprob]:
    """`score_tokens` with one count for all, brought to the host."""
    return score_tokens(logits, ids, [count] * len(ids)).rows()
