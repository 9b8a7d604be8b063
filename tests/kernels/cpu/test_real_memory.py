"""The KV pool's pages are there before a step needs them, and what is written meanwhile stays."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from kernels.cpu.backend import SMALL_POOL, CpuBackend
from kernels.cpu.memory import make_real

BLOCKS = 4096


def resident() -> int:
    """Bytes of this process in real memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def pool() -> list[torch.Tensor]:
    """Two layers, 96 MiB in all, fresh from the system."""
    return [torch.empty(2, BLOCKS, 1, 16, 96, dtype=torch.float32) for _ in range(2)]


@pytest.mark.skipif(sys.platform != "linux", reason="pages are asked for on Linux only")
def test_a_settled_pool_is_real_memory_and_keeps_what_was_written(cpu: CpuBackend):
    layers = pool()
    size = sum(layer.nbytes for layer in layers)
    assert size >= SMALL_POOL
    layers[0][1, -1] = 7.0
    before = resident()
    cpu.settle(layers)
    for thread in threading.enumerate():
        if thread.name == "kv-pages":
            thread.join(60)
    assert resident() - before > 0.9 * size
    assert (layers[0][1, -1] == 7.0).all()


def test_every_block_is_asked_for_once_the_lowest_first():
    layers, asked = [torch.empty(2, 100, 1, 4, 8) for _ in range(3)], list[tuple[int, int]]()
    make_real(layers, lambda begin, size: asked.append((begin, size))).join(60)
    assert sum(size for _, size in asked) == sum(layer.nbytes for layer in layers)
    assert len({begin for begin, _ in asked}) == len(asked)
    assert {begin for begin, _ in asked[:6]} == {half.data_ptr() for layer in layers for half in layer}
