"""C++ attention beside the machine's bounds and torch's SDPA: a section of benchmarks.kernels_cpu.

Qwen3-0.6B's heads: 16 of queries, 8 of keys and values, 128 wide; blocks of 16 in random order. torch's runs on keys
and values that lie in one piece, which no engine with a paged cache has for free.
"""

from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F

from kernels import AttentionBatch, Heads
from kernels.cpu.backend import CpuBackend

HEADS, WIDTH, BLOCK_SIZE = Heads(8, 2), 128, 16
DECODES, CONTEXT, SHARED, PREFILLS = 16, 800, 768, (1024, 4096)
POOLS = 3  # caches of as many layers: what one call reads is gone from the processor's caches at the next
Best = Callable[[Callable[[], object]], float]  # seconds of the fastest of many calls


def report_attention(cpu: CpuBackend, dtype: torch.dtype, read: float, multiply: float, best: Best) -> None:
    """Print lines. `read` bytes and `multiply` operations per second are the bounds."""
    strangers, dense = decode(cpu, dtype, best), dense_decode(dtype, best)
    bound = 2 * DECODES * CONTEXT * HEADS.kv * WIDTH * dtype.itemsize / read
    _show(f"decode, {DECODES} x {CONTEXT:,}", strangers, bound, dense)
    ours = decode(cpu, dtype, best, SHARED)
    print(f"attention, the same with {SHARED} shared {ours * 1e3:4.2f} ms, {ours / strangers:4.0%} of that time")
    for tokens in PREFILLS:
        ours, dense = prefill(cpu, dtype, tokens, best)
        pairs = tokens * (tokens + 1) / 2 * HEADS.kv * HEADS.group
        _show(f"prefill {tokens:,}", ours, 4 * WIDTH * pairs / multiply, dense)


def decode(cpu: CpuBackend, dtype: torch.dtype, best: Best, shared: int = 0) -> float:
    """Seconds of one layer's attention; the sequences' first `shared` positions lie in the same blocks."""
    lengths = [CONTEXT] * DECODES
    tables = _tables(lengths)
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE].clone()
    pools = cycle([_pool(sum(lengths), dtype) for _ in range(POOLS)])
    batch = AttentionBatch([1] * DECODES, lengths, tables, BLOCK_SIZE, HEADS)
    q = torch.randn(DECODES, HEADS.kv * HEADS.group, WIDTH).to(dtype)
    return best(lambda: cpu.attention(q, next(pools), batch, WIDTH**-0.5))


def dense_decode(dtype: torch.dtype, best: Best) -> float:
    """Seconds of torch's."""
    q = torch.randn(DECODES, HEADS.kv * HEADS.group, WIDTH).to(dtype)
    pairs = cycle([torch.randn(2, DECODES, HEADS.kv, CONTEXT, WIDTH).to(dtype) for _ in range(POOLS)])

    def dense() -> None:
        keys, values = next(pairs)
        F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)

    return best(dense)


def prefill(cpu: CpuBackend, dtype: torch.dtype, tokens: int, best: Best) -> tuple[float, float]:
    pool = _pool(tokens, dtype)
    batch = AttentionBatch([tokens], [tokens], _tables([tokens]), BLOCK_SIZE, HEADS)
    q = torch.randn(tokens, HEADS.kv * HEADS.group, WIDTH).to(dtype)
    keys, values = torch.randn(2, 1, HEADS.kv, tokens, WIDTH).to(dtype)
    rows = q.transpose(0, 1)[None].contiguous()
    return (
        best(lambda: cpu.attention(q, pool, batch, WIDTH**-0.5)),
        best(lambda: F.scaled_dot_product_attention(rows, keys, values, is_causal=True, enable_gqa=True)),
    )


def _pool(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, -(-tokens // BLOCK_SIZE), HEADS.kv, BLOCK_SIZE, WIDTH).to(dtype)


def _tables(lengths: list[int]) -> torch.Tensor:
    """Blocks of sequences of one length, in random order."""
    blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
    return torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).view(len(lengths), -1)


def _show(name: str, ours: float, bound: float, dense: float) -> None:
    print(f"attention, {name:<16} {ours * 1e3:8.2f} ms, {bound / ours:4.0%} of the bound; SDPA {dense * 1e3:8.2f} ms")
