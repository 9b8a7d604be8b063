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


class AttentionCall(ctypes.Structure):
    """As attention.h declares it."""

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
    assert q.dtype == kv.dtype
    assert q.shape[1:] == (batch.heads.kv * batch.heads.group, kv.shape[4])
    assert q.stride(2) == 1
    assert len(q) == sum(batch.query_lengths)
    out = torch.empty(q.shape, dtype=q.dtype)
    call = prepare(kv, batch, scale, softcap)
    call.q, call.kv, call.out, call.window = q.data_ptr(), kv.data_ptr(), out.data_ptr(), window or 0
    call.q_token, call.q_head = q.stride()[:2]
    library.attention(int(q.dtype == torch.bfloat16), ctypes.addressof(call))
    return out


def prepare(kv: Tensor, batch: AttentionBatch, scale: float, softcap: float | None) -> AttentionCall:
    """All of a call but the queries, the outputs, the cache and the window: the same for the layers of a step.

    The batch must be kept as long as the call. What the kernel takes for granted is checked here.
    """
    _, _, kv_heads, block_size, width = kv.shape
    assert (kv_heads, block_size) == (batch.heads.kv, batch.block_size)
    assert 1 <= width <= MOST_WIDTH
    assert kv.stride(4) == batch.tables.stride(1) == 1
    assert batch.tables.dtype == torch.int64
    assert batch.tables.shape[1] * block_size >= batch.longest
    counts, lengths = batch.spans
    call = AttentionCall(tables=batch.tables.data_ptr(), counts=counts.data_ptr(), lengths=lengths.data_ptr())
    call.kv_values, call.kv_block, call.kv_head, call.kv_key = kv.stride()[:4]
    call.table_stride, call.sequences = batch.tables.stride(0), len(counts)
    call.kv_heads, call.group, call.width, call.block_size = kv_heads, batch.heads.group, width, block_size
    call.scale, call.softcap = scale, softcap or 0.0
    return call
