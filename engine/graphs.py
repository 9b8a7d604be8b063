"""Steps of few forms, each of which is captured once: hundreds of kernels are then launched as one CUDA graph.

A form's work is the same whenever it is done: on the same memory, and without a number of the host's. So what was
captured can be replayed; on a CPU, where nothing can be captured, it is a plain call of the very same.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from engine.gpumemory import GRAPHS

PLACES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # of a step in which all decode
TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048)  # of any other step
ENTRIES = (16, 64, 256)  # of any other step


class Tail(IntEnum):
    """How a step ends. A larger one serves those that a smaller one serves, so that a batch takes its largest."""

    GREEDY = 0
    RANDOM = 1  # drawn, with filters or without, by what the device keeps of each row
    LOGITS = 2  # the same; for those with penalties, a bias, a mask or log-probabilities the sampler chooses afterwards


class Form(NamedTuple):
    """Room for so many tokens of so many entries; in a step of `decodes` each has one, which its row drew last."""

    decodes: bool
    tokens: int
    entries: int
    tail: Tail

    def __str__(self) -> str:
        what = f"{self.tokens} decodes" if self.decodes else f"{self.tokens} tokens of {self.entries} sequences"
        return f"{what}, {self.tail.name.lower()}"


def grid(buckets: Sequence[int], most: int) -> list[int]:
    """The buckets below `most`, and `most`."""
    return [*(bucket for bucket in buckets if bucket < most), most]


def at_least(buckets: Sequence[int], count: int) -> int:
    """The smallest bucket that holds so many. There must be one."""
    return buckets[bisect_left(buckets, count)]


class Work(Protocol):
    def __call__(self) -> None: ...


W = TypeVar("W", bound=Work)


def capture(work: Work, pool: Any) -> Callable[[], object]:
    """What replays the work. It must have been done before: what is compiled or set up at first use cannot be captured.

    All graphs share a memory pool, since no two of them run at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph.replay


def touch(size: int, device: torch.device) -> None:
    """Take so much memory and give it back; a graph must hold something."""
    torch.empty(max(1, size), dtype=torch.uint8, device=device)[:1].zero_()


class Graphs(Generic[W]):
    """The works of all forms. The first time, a form's work is done as it is, and then captured for the next time.

    Memory is reserved for GRAPHS of them: further forms are not captured. Where `replays` is set to False, works are
    done as they are, kernel by kernel: a seam for measurements.
    """

    def __init__(self, make: Callable[[Form], W], device: torch.device, on_compile: Callable[[str], None]) -> None:
        self._make, self._on_compile, self.replays = make, on_compile, True
        self._captures = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._works, self._replays = dict[Form, W](), dict[Form, Callable[[], object]]()
        self._device = device
        self._reserved: object = None  # a pool lives as long as one of its graphs

    def reserve(self, size: int) -> None:
        """Take the memory of all captures, in bytes, as one piece that each of them cuts up anew.

        Pieces as small forms need them do not serve larger ones: taken as they come, they would add up.
        """
        if self._captures:
            self._reserved = capture(partial(touch, size, self._device), self._pool)

    def forget(self) -> None:
        """The memory that the works were made for is gone."""
        self._works.clear()
        self._replays.clear()

    @property
    def captured(self) -> int:
        return len(self._replays)

    def find(self, form: Form) -> W:
        """A form's work, where its results lie; made when it is first asked for."""
        if form not in self._works:
            self._works[form] = self._make(form)
        return self._works[form]

    def run(self, form: Form) -> None:
        """Do a form's work."""
        replay = self._replays.get(form)
        if replay is not None and self.replays:
            replay()
            return
        captures = self._captures and self.replays and len(self._replays) < GRAPHS
        if captures:
            self._on_compile(f"CUDA graph of {form}")
        work = self.find(form)
        work()
        if captures:
            self._replays[form] = capture(work, self._pool)
