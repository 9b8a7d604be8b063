"""The KV pool's pages are there before a step needs them, and what is written meanwhile stays."""

import ctypes
import mmap
import platform
import re
import sys
import threading

import pytest
import torch

from kernels.cpu.backend import SMALL_POOL, CpuBackend
from kernels.cpu.memory import make_real

RELEASE = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
SHAPE = (2, 4096, 1, 16, 96)  # of a layer in float32: 48 MiB


def fresh_layer() -> torch.Tensor:
    """From a mapping of its own: what the C library hands out may be real memory already."""
    size = torch.Size(SHAPE).numel() * 4
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=torch.float32).view(SHAPE)


def resident(layer: torch.Tensor) -> float:
    """The share of its pages that are real memory."""
    pages = layer.nbytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(layer.data_ptr()), ctypes.c_size_t(layer.nbytes), found) == 0
    return sum(page & 1 for page in found) / pages


@pytest.mark.skipif(sys.platform != "linux" or RELEASE < (5, 14), reason="pages are asked for from Linux 5.14 on")
def test_a_settled_pool_is_real_memory_and_keeps_what_was_written(cpu: CpuBackend):
    layers = [fresh_layer() for _ in range(2)]
    assert sum(layer.nbytes for layer in layers) >= SMALL_POOL
    layers[0][1, -1] = 7.0
    assert max(map(resident, layers)) < 0.1
    cpu.settle(layers)
    for thread in threading.enumerate():
        if thread.name == "kv-pages":
            thread.join(60)
    assert [*map(resident, layers)] == [1.0, 1.0]
    assert (layers[0][1, -1] == 7.0).all()


def test_every_block_is_asked_for_once_the_lowest_first():
    layers, asked = [torch.empty(2, 100, 1, 4, 8) for _ in range(3)], list[tuple[int, int]]()
    make_real(layers, lambda begin, size: asked.append((begin, size))).join(60)
    assert sum(size for _, size in asked) == sum(layer.nbytes for layer in layers)
    assert len({begin for begin, _ in asked}) == len(asked)
    assert {begin for begin, _ in asked[:6]} == {half.data_ptr() for layer in layers for half in layer}
