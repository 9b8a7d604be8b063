"""Drawing: the argmax of scores plus counter-based Gumbel noise (Gumbel-max, Maddison et al. 2014).

The definition: of all tokens that the filters keep, the one with the largest score + noise (float32), of several the
one with the lowest id. The way: most tokens cannot win, so the FINALISTS whose score and lottery reach furthest are
found in one cheap pass, and only these get noise. How many others reach beyond the winner is geometrically distributed
with a ratio of 0.515, whatever the scores: 64 or more have a chance of 4e-19 a token, and the token is a function of
its job even then.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.filters import min_p_floor, nucleus_floor, top_k_floor
from engine.sampling.rows import Rows, Trait
from kernels import block_maxima, gumbel, members, ranks, reach

FINALISTS = 64
TILE = 1 << 15  # numbers of a pass on a CPU: they stay in a core's cache, and torch does not wake its other threads
NARROW = 8  # a row is narrow when only one block in so many holds anything that the filters keep


@dataclass(slots=True)
class Pool:
    """Tokens to draw from, for some rows of a batch that use the same filters."""

    places: Tensor  # [n] places in the batch
    rows: Tensor  # [n] rows of the sampler
    keys: Tensor  # [n, 2] of the noise
    scores: Tensor  # [n, N], the best is 0; -inf for what is excluded
    maxima: Tensor  # [n, blocks] of the scores
    ids: Tensor | None = None  # [n, N]; None: the whole vocabulary

    def keep(self, floor: Tensor) -> list["Pool"]:
        """What is not below floor [n]. Rows in which few blocks hold any of it are cut down to these blocks."""
        if self.ids is not None or not self.scores.is_cpu:
            return [self._mask(floor)]
        blocks = (self.maxima >= floor[:, None]).sum(-1)
        narrow = blocks * NARROW <= self.maxima.shape[1]
        few, many = narrow.nonzero().squeeze(1), (~narrow).nonzero().squeeze(1)
        cut = [self._take(few)._cut(floor[few], int(blocks[few].max()))] if len(few) else []
        return [*cut, self._take(many)._mask(floor[many])] if len(many) else cut

    def _take(self, chosen: Tensor) -> "Pool":
        if len(chosen) == len(self.places):
            return self
        return Pool(*(part[chosen] for part in (self.places, self.rows, self.keys, self.scores, self.maxima)))

    def _mask(self, floor: Tensor) -> "Pool":
        scores = self.scores.masked_fill(self.scores < floor[:, None], -torch.inf)
        maxima = self.maxima.masked_fill(self.maxima < floor[:, None], -torch.inf)
        return Pool(self.places, self.rows, self.keys, scores, maxima, self.ids)

    def _cut(self, floor: Tensor, blocks: int) -> "Pool":
        scores, ids = members(self.scores, self.maxima.topk(max(blocks, 1)).indices)
        scores.masked_fill_(scores < floor[:, None], -torch.inf)
        return Pool(self.places, self.rows, self.keys, scores, block_maxima(scores), ids)

    def draw(self, vocab: Tensor) -> Tensor:
        """A token for each row, [n]."""
        if self.ids is None:
            return draw_whole(self.scores, self.keys, vocab)
        return draw_among(self.scores, self.ids, self.keys)


def draw_pool(pool: Pool, filters: Trait, rows: Rows, most: int, vocab: Tensor, out: Tensor) -> None:
    """Write a token for each row of a pool to `out` [B]. `most`: the largest top_k of its rows; vocab int32."""
    pools = [pool]
    if filters & Trait.TOP_K:
        (top_k,) = rows.numbers(pool.rows, "top_k")
        pools = pool.keep(top_k_floor(pool.scores, pool.maxima, top_k.to(torch.int64), most))
    for part in pools:
        for kept in _keep_likely(part, filters, rows):
            out[kept.places] = kept.draw(vocab)


def _keep_likely(pool: Pool, filters: Trait, rows: Rows) -> list[Pool]:
    """What top-p and min-p leave."""
    if not filters & (Trait.TOP_P | Trait.MIN_P):
        return [pool]
    top_p, min_p = rows.numbers(pool.rows, "top_p", "min_p")
    floor = min_p_floor(min_p)  # log(0) = -inf where it is off
    if filters & Trait.TOP_P:
        floor = torch.maximum(floor, nucleus_floor(pool.scores, pool.maxima, top_p))
    return pool.keep(floor)


def draw_whole(scores: Tensor, keys: Tensor, vocab: Tensor) -> Tensor:
    """Tokens [B] from scores [B, vocabulary] with -inf for what is excluded, keys [B, 2], vocab [vocabulary] int32."""
    maxima = _reach_maxima(scores, keys, vocab)
    blocks = maxima.topk(min(FINALISTS, maxima.shape[1])).indices
    return draw_among(*members(scores, blocks), keys)


def draw_among(scores: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """Tokens [B] from scores [B, N] of the tokens ids [B, N], in any order."""
    if scores.shape[1] > FINALISTS:
        finalists = reach(scores, ranks(keys, ids.to(torch.int32))).topk(FINALISTS).indices
        scores, ids = scores.gather(1, finalists), ids.gather(1, finalists)
    totals = scores + gumbel(keys, ids)
    return torch.where(totals == totals.amax(-1, keepdim=True), ids, 2**31).amin(-1)


def _reach_maxima(scores: Tensor, keys: Tensor, vocab: Tensor) -> Tensor:
    """Block maxima of how far each token can come, tile by tile: written out they would leave the cache each time."""
    if not scores.is_cpu:
        return block_maxima(reach(scores, ranks(keys, vocab)))
    width = max(TILE // len(scores) // 4096, 1) * 4096
    parts = zip(scores.split(width, 1), vocab.split(width), strict=True)
    return torch.cat([block_maxima(reach(part, ranks(keys, ids))) for part, ids in parts], 1)
