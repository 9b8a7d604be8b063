from collections.abc import Callable, Iterator

import pytest
import torch


def set_threads(count: int) -> None:
    torch.set_num_threads(count)


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
