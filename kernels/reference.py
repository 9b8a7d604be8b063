"""What each kernel means, in the plainest torch there is. Slow, float32 inside, the oracle of every kernel test."""

import torch
from torch import Tensor

GELU_CUBIC, GELU_SCALE = 0.044715, (2 / torch.pi) ** 0.5


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in], transposed, plus bias [out] -> [T, out] in x's dtype."""
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over the root of its mean square (plus eps), times weight [D]. Zhang & Sennrich 2019.

    The weight may be float32 beside an x of fewer bits.
    """
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x [T, heads, D] by the angles of each token: cos, sin [T, D/2]. Su et al. 2021."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> silu(gate) * up [T, I]. Shazeer 2020."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> gelu(gate) * up [T, I], gelu in its tanh form. Hendrycks & Gimpel 2016; Shazeer 2020."""
    gate, up = gate_up.float().chunk(2, -1)
    gated = gate * (1 + torch.tanh(GELU_SCALE * (gate + GELU_CUBIC * gate**3))) / 2
    return (gated * up).to(gate_up.dtype)


def store_kv(kv: Tensor, new: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Write new [T, 2, kv_heads, D] into the cache kv [2, blocks, kv_heads, block_size, D], token by token."""
    for token, (block, offset) in enumerate(zip(blocks.tolist(), offsets.tolist(), strict=True)):
        kv[:, block, :, offset] = new[token]


def attention(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    query_lengths: list[int],
    lengths: list[int],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of a ragged batch over the paged cache.

    q [T, heads, D]; kv [2, blocks, kv_heads, block_size, D]; tables [S, max_blocks]. Sequence i owns the next
    query_lengths[i] rows of q, which are the last positions of its lengths[i]. Returns [T, heads, D] in q's dtype.
    A query sees the last `window` positions, its own among them (None: all). Scores become softcap * tanh(score /
    softcap) (Gemma 2). Keys and values that none of a sequence's queries see are not looked at.
    """
    out = torch.empty_like(q)
    group, token = q.shape[1] // kv.shape[2], 0
    for table, count, length in zip(tables, query_lengths, lengths, strict=True):
        first, reach = length - count, length if window is None else window
        used, seen = table[: -(-length // kv.shape[3])], torch.arange(max(0, first + 1 - reach), length)
        keys, values = kv[:, used].transpose(2, 3).flatten(1, 2)[:, seen].float().repeat_interleave(group, 2)
        scores = torch.einsum("qhd,khd->hqk", q[token : token + count].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(first, length)[:, None] - seen
        hidden = (behind < 0) | (behind >= reach)
        weights = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
        out[token : token + count] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        token += count
    return out
