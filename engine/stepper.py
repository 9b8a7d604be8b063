"""The two ways to compute a step have one interface, and work with the same parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.handle import Handle
from engine.model import Decoder
from engine.plan import Plan, Sampled
from engine.sampler import Sampler
from kernels import Heads


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step is computed with. Rows are 0 … `rows` - 1, and row `rows` is for padding, never content."""

    device: torch.device
    model: Decoder
    sampler: Sampler
    logits: Callable[[Tensor], Tensor]  # of hidden states [n, hidden]: float32 [n, vocabulary]
    heads: Heads
    rows: int
    columns: int  # of a block table
    block_size: int
    windowed: bool  # whether some layer has a window


class Stepper(Protocol):
    """Computes plans. Block `padding_block` of the cache is for padding, never content."""

    device_ns: int  # spent computing (on a CPU), or waiting for the device

    def open_pool(self, cache: list[Tensor], padding_block: int) -> None: ...

    def warm_up(self) -> None:
        """Set up what is set up lazily, so that it does not cost the first request."""
        ...

    def launch(self, plan: Plan) -> Handle: ...

    def collect(self, handle: Handle) -> Sampled: ...
