"""Counter-based noise: a function of (seed, position, token id) and nothing else.

All integers are int32 whose arithmetic wraps and whose right shifts copy the sign, so that every device computes the
same bits, in few operations. The logarithms are taken in float64 and rounded to float32: two good libraries agree then.
"""

import math

import torch
from torch import Tensor

RANKS = 2**31  # how many ranks there are
_SLOPE = math.log(2) / 2**23  # how much noise a unit in the last place of a rank is worth, at most
_POSITIVE = 0x7FFFFFFF


def _int32(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - 2**32 if bits >= 2**31 else bits


_FIRST, _SECOND = _int32(0x85EBCA6B), _int32(0xC2B2AE35)


def _mix32(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser (Appleby, public domain): a bijection in which every bit reaches every other."""
    h = h ^ ((h >> 16) & 0xFFFF)  # int32 shifts copy the sign: the mask makes them logical
    h = h * _FIRST
    h = h ^ ((h >> 13) & 0x7FFFF)
    h = h * _SECOND
    return h ^ ((h >> 16) & 0xFFFF)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Two 32-bit keys per row, int32 [B, 2], from 64-bit seeds (int64 [B], wrapped) and positions [B] below 2^31.

    The seed becomes two words, each of which the position then changes in its own way: two seeds share the noise of
    some positions only if both words coincide, so seeds that differ in few bits are no less apart than others.
    """
    low, high = (seeds << 32 >> 32).to(torch.int32), (seeds >> 32).to(torch.int32)
    position = positions.to(torch.int32)
    low = _mix32(low ^ _int32(0x9E3779B9))
    high = _mix32(high ^ low)
    return torch.stack((_mix32(low ^ position), _mix32(high + position * _int32(0x7F4A7C15))), -1)


def ranks(keys: Tensor, ids: Tensor) -> Tensor:
    """Where each token stands in the lottery of its row: int32 [B, N] from 0 (best) to RANKS - 1.

    ids [N] or [B, N] int32, keys [B, 2]. The finaliser once more, with a key at its start and one in its middle. Its
    shifts copy the sign, which folds 32 bits to 31 and leaves the top bit zero: no masks, and ten passes instead of 22.
    """
    h = ids ^ (keys[:, :1] & _POSITIVE)
    shifted = h >> 16
    h.bitwise_xor_(shifted).mul_(_FIRST)
    torch.bitwise_right_shift(h, 13, out=shifted)
    h.bitwise_xor_(shifted).bitwise_xor_(keys[:, 1:]).mul_(_SECOND)
    torch.bitwise_right_shift(h, 16, out=shifted)
    return h.bitwise_xor_(shifted)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise, float32 [B, N], for token ids [N] or [B, N] under the rows' keys [B, 2].

    The uniform variate v = (rank + 1/2) / RANKS is used as -log(-log(1 - v)): the winners of an argmax have small v,
    where floating point is dense, so that even one-in-a-billion tokens get their share.
    """
    v = ranks(keys, ids.to(torch.int32)).to(torch.float64).add_(0.5).mul_(1 / RANKS)
    return v.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def reach(scores: Tensor, rank: Tensor) -> Tensor:
    """How far score plus noise can come, float32 [B, N], up to a constant: cheap, for choosing whom to give noise.

    Noise is at most -log(v), and the bits of a float read as a whole number are a straight line under its logarithm
    (at most 0.06 away): so this is never too low, and for likely winners hardly too high.
    """
    bits = rank.to(torch.float32).view(torch.int32).to(torch.float32)
    return torch.add(scores, bits, alpha=-_SLOPE, out=bits)
