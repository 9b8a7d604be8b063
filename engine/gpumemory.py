"""How much of a GPU the KV pool may take: what is really free once the largest step has been computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from engine.errors import DeviceError

SHARE = 0.9  # of the GPU's memory, where nothing else was asked for
SPARE_BYTES = 256 << 20  # of what is free: drivers and libraries take some of it whenever they first need it
GRAPHS, GRAPH_BYTES = 64, 8 << 20  # forms of steps that are captured at most, and what the driver keeps of each graph


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of one GPU, read when the memory of the largest step had been given back.

    `taken` is this engine's so far: weights, the state of rows, what libraries keep; not the driver's own context.
    """

    total: int
    free: int
    taken: int
    workspace: int
    graphs: int = GRAPHS

    @property
    def captures(self) -> int:
        """For captured graphs: they share a pool of their own, which holds what a step needs once more."""
        return self.workspace + self.graphs * GRAPH_BYTES if self.graphs else 0

    def pool_bytes(self, asked: float | None) -> int:
        """What is left for the KV pool of `asked`: a share of the GPU's memory (at most 1) or bytes, for everything."""
        left = min(allowed_bytes(asked, self.total) - self.taken, self.free - SPARE_BYTES)
        return left - self.workspace - self.captures

    def explain(self, asked: float | None) -> str:
        """Where the memory goes, in numbers."""
        return (
            f"{max(0, self.pool_bytes(asked))} bytes are left for KV: the GPU has {self.total}, of which this engine"
            f" may take {allowed_bytes(asked, self.total)} (gpu_memory) and {self.free} are free; it has taken"
            f" {self.taken}, the largest step takes {self.workspace}, captured graphs {self.captures}"
        )


def allowed_bytes(asked: float | None, total: int) -> int:
    """`gpu_memory` in bytes."""
    share = SHARE if asked is None else asked
    return int(share * total if share <= 1 else share)


class Meter:
    """Reads a GPU's memory; made before this engine takes any of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before, _ = torch.cuda.mem_get_info(device)

    @classmethod
    def of(cls, device: torch.device) -> Self | None:
        """None for a CPU, whose memory is shared with everything else and is taken page by page."""
        return cls(device) if device.type == "cuda" else None

    def measure(self, largest_step: Callable[[], object], what: str, graphs: int = GRAPHS) -> Room:
        """Compute the largest step, and see what it took; so many graphs will be captured.

        Raises DeviceError with `what` when it does not fit.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        held = torch.cuda.memory_reserved(self._device)
        with refusing(self, what):
            largest_step()
            torch.cuda.synchronize(self._device)
        workspace = torch.cuda.max_memory_reserved(self._device) - held
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return Room(total, free, max(0, self.before - free), workspace, graphs)

    def refuse(self, what: str) -> DeviceError:
        free, total = torch.cuda.mem_get_info(self._device)
        taken = max(0, self.before - free)
        return DeviceError(
            f"{what} does not fit into the GPU's memory: of {total} bytes {self.before} were free at the start;"
            f" this engine has taken {taken}, {free} are free"
        )


@contextmanager
def refusing(meter: Meter | None, what: str) -> Iterator[None]:
    """Say what does not fit into a GPU's memory, and its numbers."""
    try:
        yield
    except torch.OutOfMemoryError:
        if meter is None:
            raise
        raise meter.refuse(what) from None
