"""Counter-based noise: a function of (seed, position, token id) and nothing else.

Integers are kept in int64 tensors and masked to 32 bits, so that every device computes the same bits.
"""

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_TOP = 1.0 - 2.0**-24  # the largest float32 below 1: keeps the logarithm finite


def _mix32(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser (Appleby, public domain): a bijection in which every bit reaches every other."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK32
    return h ^ (h >> 16)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Two 32-bit keys per row, int64 [B, 2], from 64-bit seeds (int64 [B], wrapped) and positions [B]."""
    low, high = seeds & _MASK32, (seeds >> 32) & _MASK32
    first = _mix32(_mix32(low ^ 0x9E3779B9) ^ positions)
    second = _mix32(_mix32(high ^ first) + 0x7F4A7C15 & _MASK32)
    return torch.stack((_mix32(first ^ second), second), -1)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise, float32 [B, N], for token ids [N] or [B, N] under the rows' keys [B, 2].

    The uniform variate is built from the small end, v = (h + 1/2) / 2^32, and used as -log(-log(1 - v)): the winners of
    an argmax have small v, where float32 is dense, so that even one-in-a-billion tokens get their share.
    """
    h = _mix32(_mix32(ids ^ keys[:, :1]) ^ keys[:, 1:])
    v = ((h.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32).clamp_(max=_TOP)
    return -torch.log(-torch.log1p(-v))
