# pyright: reportMissingImports=false, reportIndexIssue=false
"""The operations behind the door, on Triton kernels: norms, gates and attention; matrix products stay torch's.

`add_rms_norm` and `norm_rope_store` are beyond the door: `fuse` takes whole layers through them.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, Heads
from kernels.backend import TorchBackend
from kernels.layers import Layer, LayerKind, Layers
from kernels.resident import ResidentBatch
from kernels.triton import attention, heads, row
from kernels.triton.attention import Scoring, Workspace
from kernels.triton.batch import DeviceBatch, HostBatch
from kernels.triton.layers import TritonLayers
from kernels.triton.shapes import SPLIT, power_of_two, row_warps
from kernels.triton.state import TritonResident

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_GROUP = 16  # query heads of a key/value head: the rows of a decode's matrix product
WIDTHS = range(16, 257)  # of a head: what matrix units take at least, and what fits an SM
WIDEST_ROW = 32768  # that a program holds at once
GATE_BLOCK = 1024
HEADS = 8  # of a token, that a program of norm_rope_store takes


class TritonBackend(TorchBackend):
    """bfloat16, float16 and float32 on CUDA. `deterministic` asks for the batch-invariant variant of prefill."""

    def __init__(self, *, deterministic: bool, on_compile: Callable[[str], None] = lambda what: None) -> None:
        super().__init__(deterministic=deterministic, name="triton")
        self._last: HostBatch | DeviceBatch | None = None  # all layers of a step share one
        self._on_compile, self._announced = on_compile, set[tuple[object, ...]]()

    def _announce(self, *variant: object) -> None:
        """Say that a kernel is about to be compiled, the first time that a variant is used."""
        if variant not in self._announced:
            self._announced.add(variant)
            self._on_compile(f"Triton kernel {variant[0]}")

    @property
    def numerics(self) -> str:
        return f"triton-{version('triton')}-{SPLIT}-fused"

    def fuse(self, layers: Sequence[Layer], kind: LayerKind) -> Layers | None:
        norms = [layer.input_norm for layer in layers if layer.input_norm is not None]
        fits = kind.head_dim % 2 == 0 and all(len(norm) <= WIDEST_ROW for norm in norms)
        return TritonLayers(self, layers, kind) if fits and TritonLayers.serve(layers, kind) else None

    def resident(self, device: torch.device, heads: Heads, width: int) -> TritonResident | None:
        return TritonResident() if serves(heads.group, width) else None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.shape[-1] > WIDEST_ROW or x.dim() not in (2, 3):
            return super().rms_norm(x, weight, eps)
        rows = x if x.dim() == 3 else x[:, None]
        assert rows.stride(2) == 1
        assert weight.shape == x.shape[-1:]
        self._announce("rms_norm", x.shape[-1])
        y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        row.rms_norm[rows.shape[:2]](
            rows, weight, y, *rows.stride()[:2], *y.stride()[:2], eps,
            width=x.shape[-1], num_warps=row_warps(x.shape[-1]), num_stages=1,
        )  # fmt: skip
        return y.view(x.shape)

    def add_rms_norm(self, hidden: Tensor, more: Tensor, weight: Tensor, eps: float) -> Tensor:
        """hidden += more, in place; the norm of it. Both [T, hidden]: as an addition and `rms_norm` would."""
        tokens, width = hidden.shape
        assert width <= WIDEST_ROW
        assert hidden.stride(1) == more.stride(1) == 1
        self._announce("add_rms_norm", width)
        y = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        row.add_rms_norm[(tokens,)](
            hidden, more, weight, y, hidden.stride(0), more.stride(0), y.stride(0), eps,
            width=width, num_warps=row_warps(width), num_stages=1,
        )  # fmt: skip
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        self._announce("gate", "silu")
        return _gate(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        self._announce("gate", "gelu")
        return _gate(gate_up, gelu=True)

    def norm_rope_store(
        self,
        qkv: Tensor,
        kv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        turn: tuple[Tensor, Tensor, Tensor] | None,
        places: tuple[Tensor, Tensor],
        eps: float,
    ) -> Tensor:
        """Queries [T, heads, D] of qkv [T, heads + 2 kv_heads, D], normalised and turned; keys and values go to kv.

        norms: of queries and of keys, [D] each. turn: cos and sin [any, 1, D] as `rope` takes them, and the row of each
        token in them [T]. places: blocks and offsets [T]; nothing is written for a negative block.
        """
        tokens, count, width = qkv.shape
        kv_heads = kv.shape[2]
        queries = torch.empty(tokens, count - 2 * kv_heads, width, dtype=qkv.dtype, device=qkv.device)
        assert qkv.stride()[1:] == (width, 1)
        self._announce("norm_rope_store", count, width, norms is None, turn is None)
        q_norm, k_norm = norms or (qkv, qkv)
        cos, sin, turns = turn or (qkv, qkv, qkv)
        heads.norm_rope_store[(tokens, -(-count // HEADS))](
            qkv, q_norm, k_norm, cos, sin, turns, *places, queries, kv[0], kv[1], eps,
            qkv.stride(0), cos.stride(0), queries.stride(0), *kv.stride()[1:4],
            heads=count - 2 * kv_heads, kv_heads=kv_heads, width=width, at_once=HEADS,
            normed=norms is not None, turned=turn is not None, num_warps=2, num_stages=1,
        )  # fmt: skip
        return queries

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        batch: AttentionBatch | ResidentBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if not serves(batch.heads.group, q.shape[2]):
            return super().attention(q, kv, batch, scale, window, softcap)
        if self._last is None or self._last.batch is not batch:
            self._last = HostBatch(batch) if isinstance(batch, AttentionBatch) else DeviceBatch(batch)
        last, scoring, out = self._last, Scoring(scale, softcap, window), torch.empty_like(q)
        splits = last.splits(window)
        variant = q.shape[1:], power_of_two(last.layout.count), window is None, softcap is None
        if splits is not None:
            self._announce("decode_splits", *variant)
            workspace = Workspace.make(splits.capacity, q.shape[1], q.shape[2], q.device)
            attention.attend_decodes(q, kv, out, last.layout, splits, scoring, workspace)
        tokens = attention.tile_tokens(q, kv, invariant=self._deterministic)
        tiles = last.tiles(tokens)
        if tiles is not None:
            self._announce("prefill", *variant)
            attention.attend_chunks(q, kv, out, last.layout, tiles, scoring, invariant=self._deterministic)
        return out


def serves(group: int, width: int) -> bool:
    """Whether attention's kernels do: so many query heads for each of the keys', of this width."""
    return group <= MOST_GROUP and width in WIDTHS


def _gate(gate_up: Tensor, *, gelu: bool) -> Tensor:
    tokens, doubled = gate_up.shape
    assert gate_up.stride(1) == 1
    inner = doubled // 2
    y = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    row.gate[(tokens, -(-inner // GATE_BLOCK))](
        gate_up, y, gate_up.stride(0), y.stride(0), inner, block=GATE_BLOCK, gelu=gelu, num_warps=4, num_stages=1
    )
    return y
