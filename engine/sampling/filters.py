"""Top-k, top-p and min-p as one number per row: the lowest score that is kept. No sort of a vocabulary.

Scores are 0 for the likeliest token and less for the others. The definition, in the order in which they apply:

- top-k keeps the k largest scores, and all that equal the last of them (Fan et al. 2018);
- top-p (Holtzman et al. 2019) keeps a token if those with larger scores, of the ones that top-k kept, weigh less than
  p of all that top-k kept. A token's weight is a whole number, floor(exp(score) * 2^35), so that sums come out the
  same in any order: a vocabulary's is below 2^53, which float64 holds exactly. What weighs nothing is in no nucleus;
- min-p (Nguyen et al. 2024) keeps scores of at least log(min_p).

So tokens of equal score are kept or dropped together, and the best one always stays.
"""

import torch
from torch import Tensor

from kernels import largest

UNIT = 2.0**35  # the likeliest token's weight
HEAD = 256  # most nuclei are within so many tokens; wider ones take two passes over their row
SEARCHED = 32  # rows of a search: its second histogram takes 512 KB a row
_LOW_BITS = 16  # of a score's 32, left to the second pass
_BINS = 0x41C5  # the upper bits of 24.5, and one more bin for all beyond: weights are 0 from 24.3 on


def top_k_floor(scores: Tensor, maxima: Tensor, top_k: Tensor, most: int) -> Tensor:
    """The top_k-th largest score [B] of scores [B, N], whose block maxima are known; top_k [B] is at most `most`."""
    return largest(scores, maxima, most).gather(1, top_k[:, None] - 1).squeeze(1)


def nucleus_floor(scores: Tensor, maxima: Tensor, top_p: Tensor) -> Tensor:
    """The lowest score [B] in the nucleus of scores [B, N], whose block maxima are known; top_p float64 [B]."""
    weighed = _weights(scores)
    target = weighed.sum(-1, dtype=torch.float64) * top_p
    if not scores.is_cpu:
        return _search(scores, weighed, target)  # finding out whether the head is enough would wait for the device
    found, enough = _in_head(largest(scores, maxima, min(HEAD, scores.shape[1])), target)
    wide = (~enough).nonzero().squeeze(1)
    if len(wide):
        found[wide] = _search(scores[wide], weighed[wide], target[wide])
    return found


def min_p_floor(min_p: Tensor) -> Tensor:
    """log(min_p), float64 [B] -> float32 [B]."""
    return min_p.log().to(torch.float32)


def _weights(scores: Tensor) -> Tensor:
    """floor(exp(score) * 2^35): whole numbers in float32, which rounds none of them."""
    return scores.exp().mul_(UNIT).floor_()


def _in_head(head: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the nucleus ends within the largest scores, head [B, n] in falling order; and whether it does, [B]."""
    mass = _weights(head).cumsum(-1, dtype=torch.float64)
    before = (mass < target[:, None]).sum(-1)
    last = before.clamp(max=head.shape[1] - 1)
    return head.gather(1, last[:, None]).squeeze(1), before < head.shape[1]


def _search(scores: Tensor, weighed: Tensor, target: Tensor) -> Tensor:
    """The same by a histogram of the scores' upper bits, and one of the lower bits within the bin where it ends."""
    parts = zip(scores.split(SEARCHED), weighed.split(SEARCHED), target.split(SEARCHED), strict=True)
    return torch.cat([_search_rows(*part) for part in parts])


def _search_rows(scores: Tensor, weighed: Tensor, target: Tensor) -> Tensor:
    bits, weighed = scores.abs().view(torch.int32), weighed.to(torch.float64)  # rising bits are falling scores
    upper = _edge((bits >> _LOW_BITS).clamp_(max=_BINS - 1), weighed, target, _BINS) << _LOW_BITS
    # One more bin at each end: for all that comes before, and for all that comes after.
    within = (bits - (upper - 1)[:, None]).clamp_(0, 2**_LOW_BITS + 1)
    lower = _edge(within, weighed, target, 2**_LOW_BITS + 2) - 1
    return -(upper + lower).view(torch.float32)


def _edge(bins: Tensor, weighed: Tensor, target: Tensor, count: int) -> Tensor:
    """The first bin [B] up to which the weights sum to the target [B]; int32. Sums are exact."""
    sums = weighed.new_zeros(len(bins), count).scatter_add_(1, bins.to(torch.int64), weighed).cumsum_(-1)
    return (sums < target[:, None]).sum(-1, dtype=torch.int32).clamp_(max=count - 1)
