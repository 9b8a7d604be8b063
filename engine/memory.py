"""How many KV blocks: as told, or as the memory that is really free allows; and what loading gives back."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import DeviceError
from engine.gpumemory import Room
from engine.modelconfig import ModelConfig

CPU_SHARE = 0.25  # of free memory, which is shared with everything else on the machine
CPU_MOST_BYTES = 4 << 30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LOADING_BYTES, SERVING_BYTES = 1 << 20, 32 << 20  # blocks from this size on are mappings of their own


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * model.layers * model.kv_heads * block_size * model.head_dim * dtype.itemsize


def kv_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_model_len: int, room: Room | None = None
) -> int:
    """Usable blocks of the pool; `room` is a GPU's. Raises DeviceError naming the numbers when they do not fit."""
    size = block_bytes(model, config.block_size, dtype)
    left = free_budget() if room is None else room.pool_bytes(config.gpu_memory) - size  # one block is for padding
    budget = left if config.kv_memory is None else config.kv_memory
    blocks = min(budget // size, config.max_sequences * -(-max_model_len // config.block_size))
    blocks = blocks if config.kv_blocks is None else config.kv_blocks
    if blocks < 1 and config.kv_memory is not None:
        raise DeviceError(f"kv_memory: {budget} bytes do not hold one KV block of {size} bytes")
    if blocks < 1 or (room is not None and blocks * size > left):
        where = f"{max(0, left)} bytes are free for it" if room is None else room.explain(config.gpu_memory)
        raise DeviceError(f"a KV pool of {max(1, blocks)} blocks of {size} bytes does not fit: {where}")
    return blocks


def free_budget() -> int:
    """Bytes that the pool may take of what is free on a CPU now."""
    return min(int(available_bytes() * CPU_SHARE), CPU_MOST_BYTES)


def available_bytes() -> int:
    """What the machine has available, and the control groups still allow."""
    limits = [CPU_MOST_BYTES * 4]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    for group in _control_groups():
        limit, used = group / "memory.max", group / "memory.current"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            limits.append(int(text) - int(used.read_text()))
    return max(0, min(limits))


def _control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """The folders of this process's control group (version 2) and those around it; a container sees its own as root."""
    yield root
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    for part in (Path(path), *Path(path).parents):
        if part != Path() and ".." not in part.parts:
            yield root / part


@contextmanager
def returning_memory() -> Iterator[None]:
    """While weights are loaded, what is freed goes back to the system at once; afterwards it is kept for the next step.

    Each matrix is there once more while a backend packs it. The C library would keep up to 64 MB of such blocks, at the
    peak and ever after; a step, on the other hand, must not ask the system for its blocks.
    """
    option = _mallopt()
    option(M_MMAP_THRESHOLD, LOADING_BYTES)
    try:
        yield
    finally:
        option(M_MMAP_THRESHOLD, SERVING_BYTES)
        option(M_TRIM_THRESHOLD, 2 * SERVING_BYTES)  # the C library's own ratio


def _mallopt() -> Callable[[int, int], object]:
    """That of glibc; other C libraries have none, or take other numbers."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return lambda option, value: None
    return library.mallopt
