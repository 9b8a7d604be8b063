# pyright: reportMissingImports=false, reportIndexIssue=false
"""Launching paged attention. Nothing here reads the device, and every grid follows from numbers of the host's."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.triton.batch import Layout, Splits, Tiles
from kernels.triton.decode import decode_splits, merge_splits
from kernels.triton.prefill import prefill_splits, prefill_tiles
from kernels.triton.shapes import AttentionShape, decode_tiles, power_of_two
from kernels.triton.shapes import prefill_tiles as tiles_of_prefill

PROGRAMS = 1056  # that a decode starts at most: eight for each of 132 multiprocessors, then each takes several splits
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Scoring:
    """From products to scores: scaled, bent by a soft-cap (Gemma 2), seen through a window."""

    scale: float
    softcap: float | None
    window: int | None

    @property
    def numbers(self) -> tuple[float, float, float, int]:
        """scale, the factor that brings a score to units of log 2, softcap and window, as the kernels take them."""
        factor = LOG2_E if self.softcap else self.scale * LOG2_E
        return self.scale, factor, self.softcap or 0.0, self.window or 0

    @property
    def flags(self) -> dict[str, bool]:
        return {"windowed": self.window is not None, "capped": self.softcap is not None}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results of splits: outs float32 [capacity, heads, D], tops and totals [capacity, heads]."""

    outs: Tensor
    tops: Tensor
    totals: Tensor

    @classmethod
    def make(cls, capacity: int, heads: int, width: int, device: torch.device) -> "Workspace":
        outs = torch.empty(capacity, heads, width, dtype=torch.float32, device=device)
        tops, totals = torch.empty(2, capacity, heads, dtype=torch.float32, device=device)
        return cls(outs, tops, totals)


def shape_of(q: Tensor, kv: Tensor) -> AttentionShape:
    assert q.dtype == kv.dtype
    assert q.stride(2) == kv.stride(4) == 1
    assert q.shape[1] % kv.shape[2] == 0
    return AttentionShape(q.shape[1] // kv.shape[2], q.shape[2], kv.shape[3], q.element_size())


def attend_decodes(
    q: Tensor, kv: Tensor, out: Tensor, layout: Layout, splits: Splits, scoring: Scoring, workspace: Workspace
) -> None:
    """Write the rows of entries with splits to out. q, out [T, heads, D]; kv [2, blocks, kv_heads, block_size, D]."""
    shape = shape_of(q, kv)
    tiles, options = decode_tiles(shape)
    programs = min(splits.capacity, -(-PROGRAMS // kv.shape[2]))
    decode_splits[(kv.shape[2], programs)](
        q, kv[0], kv[1], layout.tables, layout.rows, layout.starts, layout.lengths, splits.starts,
        workspace.outs, workspace.tops, workspace.totals, *scoring.numbers, layout.count,
        *q.stride()[:2], *kv.stride()[1:4], layout.tables.stride(0),
        group=shape.group, width=shape.width, block_size=shape.block_size, most=power_of_two(layout.count),
        **tiles, **scoring.flags, **options,
    )  # fmt: skip
    merge_splits[(layout.count, q.shape[1])](
        workspace.outs, workspace.tops, workspace.totals, splits.starts, layout.starts, out, q.shape[1],
        *out.stride()[:2], width=shape.width, num_warps=1, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


@cache
def target_of(device: torch.device) -> int:
    """Which machine code is compiled for: 90 is sm_90. On a CPU, where only the interpreter runs, as on an H200."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tile_tokens(q: Tensor, kv: Tensor, *, invariant: bool) -> int:
    """Tokens of a prefill tile: what `Tiles` counts in."""
    shape = shape_of(q, kv)
    return (16 if invariant else tiles_of_prefill(shape, target_of(q.device))[0]["block_m"]) // shape.group


def attend_chunks(
    q: Tensor, kv: Tensor, out: Tensor, layout: Layout, tiles: Tiles, scoring: Scoring, *, invariant: bool
) -> None:
    """Write the rows of the entries with tiles to out. `invariant`: with the bits that decodes would give them."""
    shape = shape_of(q, kv)
    kernel = prefill_splits if invariant else prefill_tiles
    sizes, options = decode_tiles(shape) if invariant else tiles_of_prefill(shape, target_of(q.device))
    kernel[(kv.shape[2], tiles.capacity)](
        q, kv[0], kv[1], out, layout.tables, layout.rows, layout.starts, layout.lengths, tiles.starts,
        *scoring.numbers, layout.count,
        *q.stride()[:2], *kv.stride()[1:4], *out.stride()[:2], layout.tables.stride(0),
        group=shape.group, width=shape.width, block_size=shape.block_size, most=power_of_two(layout.count),
        **sizes, **scoring.flags, **options,
    )  # fmt: skip
