"""Paged attention on the C++ kernels: decodes, chunks and whole prefills through one entry."""

import ctypes

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.cpu.library import Library

MOST_WIDTH = 1024  # of a head, as attention.cpp has it
_POINTERS = ("q", "kv", "out", "tables", "counts", "lengths")
_STRIDES = ("q_token", "q_head", "kv_values", "kv_block", "kv_head", "kv_key", "table_stride")
_SIZES = ("sequences", "kv_heads", "group", "width", "block_size", "window")


class _Attention(ctypes.Structure):
    """As attention.cpp declares it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _SIZES),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


def paged_attention(
    library: Library,
    q: Tensor,
    kv: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """q [T, heads, D], kv [2, blocks, kv_heads, block_size, D], both bfloat16 or both float32 -> [T, heads, D]."""
    _check(q, kv, batch)
    out = torch.empty(q.shape, dtype=q.dtype)
    counts, lengths = batch.spans
    call = _Attention(
        q.data_ptr(), kv.data_ptr(), out.data_ptr(), batch.tables.data_ptr(), counts.data_ptr(), lengths.data_ptr(),
        *q.stride()[:2], *kv.stride()[:4], batch.tables.stride(0),
        len(counts), batch.heads.kv, batch.heads.group, q.shape[2], batch.block_size, window or 0,
        scale, softcap or 0.0,
    )  # fmt: skip
    library.attention(int(q.dtype == torch.bfloat16), ctypes.addressof(call))
    return out


def _check(q: Tensor, kv: Tensor, batch: AttentionBatch) -> None:
    """Whatever the kernel takes for granted."""
    assert q.dtype == kv.dtype
    assert q.shape[1:] == (batch.heads.kv * batch.heads.group, kv.shape[4])
    assert kv.shape[2:4] == (batch.heads.kv, batch.block_size)
    assert 1 <= q.shape[2] <= MOST_WIDTH
    assert q.stride(2) == kv.stride(4) == batch.tables.stride(1) == 1
    assert len(q) == sum(batch.query_lengths)
    assert batch.tables.dtype == torch.int64
    assert batch.tables.shape[1] * batch.block_size >= batch.longest
