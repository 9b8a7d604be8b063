"""All layers of a decoder in one call to the C++ kernels: at batch 1 their callers in Python took a tenth of a step."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.cpu.attention import AttentionCall, prepare
from kernels.cpu.library import Library
from kernels.cpu.linear import PackedLinear
from kernels.layers import Layer, LayerKind
from kernels.resident import ResidentBatch

ROPES, GROUP_TOKENS = 4, 280  # as layers.cpp has them


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("inner", "outputs", "format")),
    )


_NORMS = ("input_norm", "q_norm", "k_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")
_LINEARS = ("qkv", "output", "gate_up", "down")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _NORMS),
        *((name, _Linear) for name in _LINEARS),
        ("kv", ctypes.c_void_p),
        ("window", ctypes.c_int32),
        ("rope", ctypes.c_int32),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "memory", "blocks", "offsets")),
        ("cos", ctypes.c_void_p * ROPES),
        ("sin", ctypes.c_void_p * ROPES),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("eps", "multiplier")),
        *((name, ctypes.c_int32) for name in ("half", "gelu", "joint")),
        ("attention", AttentionCall),
    )


class FusedLayers:
    """A stack of layers. Use `of`, which knows what can be fused."""

    def __init__(self, library: Library, layers: Sequence[Layer], kind: LayerKind, dtype: torch.dtype) -> None:
        self._library, self._parts, self._kind, self._dtype = library, list(layers), kind, dtype
        # Float32 holds each weight of fewer bits exactly.
        self._norms = [{name: norm.float().contiguous() for name, norm in _norms(parts)} for parts in layers]
        pairs = zip(layers, self._norms, strict=True)
        self._layers = (_Layer * len(layers))(*(_layer(parts, norms) for parts, norms in pairs))
        self._same = {"eps": kind.eps, "multiplier": kind.multiplier, "gelu": kind.gelu, "joint": kind.joint_norms}
        first = self._layers[0]
        self._hidden, self._queries = first.qkv.inner, first.output.inner
        # As layers.cpp takes them: queries and attended; of a group hidden states twice, qkv or gate_up, gated.
        self._between = 2 * self._hidden + max(first.qkv.outputs, first.gate_up.outputs) + first.down.inner

    @classmethod
    def of(cls, library: Library, layers: Sequence[Layer], kind: LayerKind) -> "FusedLayers | None":
        """None for layers that are not all alike."""
        linears = [
            [linear for name in _LINEARS if isinstance(linear := getattr(parts, name), PackedLinear)]
            for parts in layers
        ]
        shapes = {tuple((linear.inner, linear.outputs, linear.dtype) for linear in layer) for layer in linears}
        if len(shapes) != 1 or len(linears[0]) != len(_LINEARS) or len({linear.dtype for linear in linears[0]}) != 1:
            return None
        widths = _norm_widths(linears[0][0], linears[0][1], kind)
        assert all(len(norm) == widths[name] for parts in layers for name, norm in _norms(parts))
        if any(parts.rope is not None and parts.rope >= ROPES for parts in layers):
            return None
        return cls(library, layers, kind, linears[0][0].dtype)

    def __call__(
        self,
        hidden: Tensor,
        caches: Sequence[Tensor],
        turns: Sequence[tuple[Tensor, Tensor]],
        blocks: Tensor,
        offsets: Tensor,
        batch: AttentionBatch | ResidentBatch,
    ) -> None:
        assert isinstance(batch, AttentionBatch), "`resident` is None"
        tokens = len(hidden)
        self._check(hidden, caches, turns, blocks, offsets, batch)
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.kv = cache.data_ptr()
        memory = torch.empty(2 * tokens * self._queries + min(tokens, GROUP_TOKENS) * self._between, dtype=self._dtype)
        call = prepare(caches[0], batch, self._kind.scale, self._kind.softcap)
        call.q_token, call.q_head = self._queries, self._kind.head_dim
        step = _Step(
            hidden=hidden.data_ptr(), memory=memory.data_ptr(), blocks=blocks.data_ptr(), offsets=offsets.data_ptr(),
            tokens=tokens, half=int(self._dtype == torch.bfloat16), attention=call, **self._same,
        )  # fmt: skip
        for number, (cos, sin) in enumerate(turns):
            step.cos[number], step.sin[number] = cos.data_ptr(), sin.data_ptr()
        self._library.layers(ctypes.addressof(step), ctypes.addressof(self._layers), len(self._layers))

    def _check(
        self,
        hidden: Tensor,
        caches: Sequence[Tensor],
        turns: Sequence[tuple[Tensor, Tensor]],
        blocks: Tensor,
        offsets: Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Whatever layers.cpp takes for granted, beside what `prepare` checks."""
        tokens, shape, strides = len(hidden), caches[0].shape, caches[0].stride()
        assert tokens > 0
        assert hidden.shape == (tokens, self._hidden)
        assert hidden.dtype == self._dtype
        assert hidden.is_contiguous()
        assert tokens == sum(batch.query_lengths) == len(blocks) == len(offsets)
        assert blocks.dtype == offsets.dtype == torch.int64
        assert blocks.is_contiguous()
        assert offsets.is_contiguous()
        assert batch.heads.kv * batch.heads.group * shape[4] == self._queries
        assert shape[4] == self._kind.head_dim
        assert self._layers[0].qkv.outputs == self._queries + 2 * batch.heads.kv * shape[4]
        assert all(c.shape == shape and c.stride() == strides and c.dtype == self._dtype for c in caches)
        assert len(turns) <= ROPES
        for angles in (angle for turn in turns for angle in turn):
            assert angles.shape == (tokens, 1, shape[4])
            assert angles.dtype == torch.float32
            assert angles.is_contiguous()


def _norms(parts: Layer) -> list[tuple[str, Tensor]]:
    """The norms that a layer has."""
    return [(name, weight) for name in _NORMS if (weight := getattr(parts, name)) is not None]


def _norm_widths(qkv: PackedLinear, output: PackedLinear, kind: LayerKind) -> dict[str, int]:
    """What layers.cpp takes norms to be as wide as."""
    queries, keys = output.inner, (qkv.outputs - output.inner) // 2
    heads = (queries, keys) if kind.joint_norms else (kind.head_dim, kind.head_dim)
    return {**dict.fromkeys(_NORMS, qkv.inner), "q_norm": heads[0], "k_norm": heads[1]}


def _layer(parts: Layer, norms: dict[str, Tensor]) -> _Layer:
    return _Layer(
        **{name: weight.data_ptr() for name, weight in norms.items()},
        **{name: _linear(getattr(parts, name)) for name in _LINEARS},
        window=parts.window or 0,
        rope=-1 if parts.rope is None else parts.rope,
    )


def _linear(linear: PackedLinear) -> _Linear:
    bias = None if linear.bias is None else linear.bias.data_ptr()
    return _Linear(linear.packed.data_ptr(), bias, linear.inner, linear.outputs, linear.format)
