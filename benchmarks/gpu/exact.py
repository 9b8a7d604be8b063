"""The kernels' meaning in float64: what their results are compared with."""

import torch
from torch import Tensor

GELU_CUBIC, GELU_SCALE = 0.044715, (2 / torch.pi) ** 0.5


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate * (1 + torch.tanh(GELU_SCALE * (gate + GELU_CUBIC * gate**3))) / 2 * up


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """x [T, heads, D], angles [T, D / 2]."""
    first, second = x.double().chunk(2, -1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(
    q: Tensor, kv: Tensor, tables: Tensor, counts: list[int], lengths: list[int], window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """As kernels.reference.attention, scaled by the root of the head's width."""
    outs, first = list[Tensor](), 0
    for table, count, length in zip(tables, counts, lengths, strict=True):
        seen = kv[:, table[: -(-length // kv.shape[3])]].transpose(2, 3).flatten(1, 2)[:, :length].double()
        keys, values = seen.repeat_interleave(q.shape[1] // kv.shape[2], 2)
        scores = torch.einsum("qhd,khd->hqk", q[first : first + count].double(), keys) / q.shape[2] ** 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(length - count, length)[:, None] - torch.arange(length)
        hidden = (behind < 0) | (behind >= (length if window is None else window))
        weights = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        first += count
    return torch.cat(outs)
