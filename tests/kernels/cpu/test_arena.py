"""Memory for packed weights."""

import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu.memory import PAGE_BYTES, Arena


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_arena_is_private_memory_that_can_have_large_pages() -> None:
    """Python maps shared memory unless it is told otherwise, and Linux gives that none, whatever is advised."""
    advised = list[tuple[int, int]]()
    taken = Arena(lambda begin, size: advised.append((begin, size))).take(1024)

    begin, size = advised[0]
    assert begin <= taken.data_ptr() < begin + size
    assert begin % PAGE_BYTES == 0
    maps = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    spans = ((*(int(end, 16) for end in words[0].split("-")), words[1]) for words in maps)
    assert next(rights for first, last, rights in spans if first <= begin < last) == "rw-p"


def test_arena_hands_out_cache_lines_one_after_the_other() -> None:
    arena = Arena(lambda begin, size: None)
    first, second = arena.take(3), arena.take(5, torch.uint8)
    assert second.data_ptr() - first.data_ptr() == 64
    assert (len(first), len(second)) == (3, 5)
