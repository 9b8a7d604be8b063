"""Memory for packed weights: large mappings on 2 MiB pages, where reading is half as fast again as on 4 KiB pages."""

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # mapped at once; what is not used of it never becomes real memory
PAGE_BYTES = 2 << 20
LINE_BYTES = 64


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
