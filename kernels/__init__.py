"""The maths of a forward pass. One door per operation, one backend per device, one plain-torch reference for each.

`select(...)` gives the backend; everything else is imported from nowhere else. The meaning of each operation stands in
`kernels/reference.py`, which is also the oracle of the kernel tests.

The names are loaded when the first of them is asked for: they need torch, which takes a second, and `kernels.cpu.early`
is to begin before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.attention import AttentionBatch, Heads
    from kernels.backend import Backend, Embedding, TorchBackend
    from kernels.layers import Layer, LayerKind, Layers
    from kernels.linear import Linear
    from kernels.noise import gumbel, ranks, reach, row_keys
    from kernels.resident import Lottery, Parameters, Resident, ResidentBatch, State, Step
    from kernels.select import KernelsMissingError, select
    from kernels.top import best, block_maxima, first_argmax, largest, members, top_columns
    from kernels.transfer import Arrival, download, page_locked, send, to_device, upload, upload_all

__all__ = [
    "Arrival",
    "AttentionBatch",
    "Backend",
    "Embedding",
    "Heads",
    "KernelsMissingError",
    "Layer",
    "LayerKind",
    "Layers",
    "Linear",
    "Lottery",
    "Parameters",
    "Resident",
    "ResidentBatch",
    "State",
    "Step",
    "TorchBackend",
    "best",
    "block_maxima",
    "download",
    "first_argmax",
    "gumbel",
    "largest",
    "members",
    "page_locked",
    "ranks",
    "reach",
    "row_keys",
    "select",
    "send",
    "to_device",
    "top_columns",
    "upload",
    "upload_all",
]

_MODULES = ("attention", "backend", "layers", "linear", "noise", "resident", "select", "top", "transfer")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    for module in _MODULES:
        found = vars(import_module(f"kernels.{module}"))
        globals().update({known: found[known] for known in __all__ if known in found})
    return globals()[name]
