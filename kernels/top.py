"""The best of many numbers, in one pass over them: the largest of each block first, then inside the best blocks.

The k largest numbers lie in the k blocks with the largest maxima, so no vocabulary is ever sorted, nor handed to topk.
"""

import torch
from torch import Tensor

BLOCK = 64
_LAST = 2**31 - 1


def block_maxima(x: Tensor) -> Tensor:
    """The largest number of each block of BLOCK columns: x [B, N] -> [B, ceil(N / BLOCK)]. NaN where one is in it."""
    whole = x.shape[1] // BLOCK
    maxima = x[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).amax(-1)
    if whole * BLOCK == x.shape[1]:
        return maxima
    return torch.cat((maxima, x[:, whole * BLOCK :].amax(-1, keepdim=True)), 1)


def best(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each block and each row's first column of its largest: see below. x [B, N]."""
    maxima = block_maxima(x)
    return maxima, first_argmax(x, maxima)


def members(x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers in blocks [B, K] of x [B, N], and their columns: both [B, K * BLOCK]. -inf beyond the end of x."""
    columns = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=x.device)).flatten(1)
    if x.shape[1] % BLOCK == 0:
        return x.gather(1, columns), columns
    inside = columns.clamp(max=x.shape[1] - 1)
    return x.gather(1, inside).masked_fill_(inside != columns, -torch.inf), inside


def first_argmax(x: Tensor, maxima: Tensor) -> Tensor:
    """The column [B] of the largest number in each row of x [B, N]; of several equal ones the lowest."""
    values, columns = members(x, maxima.argmax(-1, keepdim=True))
    return columns.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)


def largest(x: Tensor, maxima: Tensor, count: int) -> Tensor:
    """The `count` largest numbers of each row, in falling order, [B, count]."""
    if 4 * count < maxima.shape[1]:
        x = members(x, maxima.topk(count).indices)[0]
    return x.topk(count).values


def top_columns(x: Tensor, maxima: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest numbers, largest first and of equal ones the lowest column first."""
    if count < maxima.shape[1]:
        blocks = _keyed(maxima, torch.arange(maxima.shape[1], device=x.device)).topk(count).indices
        x, columns = members(x, blocks)
    else:
        columns = torch.arange(x.shape[1], device=x.device).expand_as(x)
    return columns.gather(1, _keyed(x, columns).topk(count).indices)


def _keyed(x: Tensor, columns: Tensor) -> Tensor:
    """int64 keys in the order of (number, falling column), so that no two are equal."""
    bits = (x + 0.0).view(torch.int32)  # + 0.0: the two zeros are equal, their bits are not
    return ((bits ^ ((bits >> 31) & _LAST)).to(torch.int64) << 32) | (_LAST - columns)
