"""Counter-based noise: a function of (seed, position, token id) and nothing else.

All integers are int32 tensors whose arithmetic wraps, so that every device computes the same bits, four lanes where
int64 has one.
"""

import torch
from torch import Tensor

_TOP = 1.0 - 2.0**-24  # the largest float32 below 1: keeps the logarithm finite


def _int32(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - 2**32 if bits >= 2**31 else bits


def _mix32(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser (Appleby, public domain): a bijection in which every bit reaches every other."""
    h = h ^ ((h >> 16) & 0xFFFF)  # int32 shifts copy the sign: the mask makes them logical
    h = h * _int32(0x85EBCA6B)
    h = h ^ ((h >> 13) & 0x7FFFF)
    h = h * _int32(0xC2B2AE35)
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


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise, float32 [B, N], for token ids [N] or [B, N] under the rows' keys [B, 2].

    The uniform variate is built from the small end, v = (h + 1/2) / 2^32, and used as -log(-log(1 - v)): the winners of
    an argmax have small v, where float32 is dense, so that even one-in-a-billion tokens get their share.
    """
    h = _mix32(_mix32(ids.to(torch.int32) ^ keys[:, :1]) ^ keys[:, 1:])
    v = h.to(torch.float64).add_(2.0**31 + 0.5).mul_(2.0**-32).to(torch.float32).clamp_(max=_TOP)
    return -torch.log(-torch.log1p(-v))
