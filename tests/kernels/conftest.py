from collections.abc import Callable, Iterator

import pytest
import torch

from kernels import attention, linear


def set_threads(count: int) -> None:
    """What is measured once per process holds for the number of threads that it was measured with."""
    torch.set_num_threads(count)
    attention._row_counts.cache_clear()
    linear._row_counts.cache_clear()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    if before != 1:
        set_threads(1)
    yield
    if before != torch.get_num_threads():
        set_threads(before)


@pytest.fixture
def threads(one_thread: None) -> Iterator[Callable[[int], None]]:
    """threads(count): use so many from here to the test's end."""
    yield set_threads
    if torch.get_num_threads() != 1:
        set_threads(1)
