"""Memory on 2 MiB pages, where reading is half as fast again as on 4 KiB pages: packed weights, and the KV pool."""

import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # mapped at once; what is not used of it never becomes real memory
PAGE_BYTES = 2 << 20
LINE_BYTES = 64
SLICES = 32  # of a pool, made real one after the other: a step that needs a page itself waits for a slice at most


class Arena:
    """Hands out uninitialised tensors, one after the other. A mapping is freed with the last tensor in it."""

    def __init__(self, advise_huge: Callable[[int, int], None]) -> None:
        self._advise = advise_huge
        self._chunk: Tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """A tensor [count] that begins on a cache line."""
        size = -(-count * dtype.itemsize // LINE_BYTES) * LINE_BYTES
        if size > len(self._chunk):
            self._chunk = self._map(max(size, CHUNK_BYTES))
        taken, self._chunk = self._chunk[:size], self._chunk[size:]
        return taken[: count * dtype.itemsize].view(dtype)

    def _map(self, size: int) -> Tensor:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # Linux gives shared memory no large pages
        mapped = torch.frombuffer(mmap.mmap(-1, size + PAGE_BYTES, flags=private), dtype=torch.uint8)
        chunk = mapped[-mapped.data_ptr() % PAGE_BYTES :][:size]
        self._advise(chunk.data_ptr(), size)
        return chunk


def make_real(pool: Sequence[Tensor], populate: Callable[[int, int], None]) -> threading.Thread:
    """Have the system give the pages of a KV pool, tensors [2, blocks, ...], in a thread: the lowest blocks first.

    Else the steps that write them first would wait for that: a sixth of a prefill's time, and far more on some virtual
    machines.
    """
    thread = threading.Thread(target=_make_real, args=(pool, populate), name="kv-pages", daemon=True)
    thread.start()
    return thread


def _make_real(pool: Sequence[Tensor], populate: Callable[[int, int], None]) -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # where a sandbox forbids it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread: steps go first
    for number in range(SLICES):
        for blocks in (half for cache in pool for half in cache):
            first, end = (len(blocks) * cut // SLICES for cut in (number, number + 1))
            if some := blocks[first:end].nbytes:
                populate(blocks[first].data_ptr(), some)
