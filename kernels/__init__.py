"""The maths of a forward pass. One door per operation, one backend per device, one plain-torch reference for each.

`select(...)` gives the backend; everything else is imported from nowhere else. The meaning of each operation stands in
`kernels/reference.py`, which is also the oracle of the kernel tests.
"""

from kernels.attention import AttentionBatch, Heads
from kernels.backend import Backend, TorchBackend
from kernels.linear import Linear
from kernels.noise import gumbel, ranks, reach, row_keys
from kernels.top import block_maxima, first_argmax, largest, members, top_columns


def select(*, deterministic: bool) -> Backend:
    """The backend for plain torch, on any device. Deterministic: a row's result never depends on the other rows."""
    return TorchBackend(deterministic=deterministic)


__all__ = [
    "AttentionBatch",
    "Backend",
    "Heads",
    "Linear",
    "TorchBackend",
    "block_maxima",
    "first_argmax",
    "gumbel",
    "largest",
    "members",
    "ranks",
    "reach",
    "row_keys",
    "select",
    "top_columns",
]
