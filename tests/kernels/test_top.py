"""The best of many numbers by blocks: held against plain sorts, at every size around a block's."""

import pytest
import torch
from torch import Tensor

from kernels import block_maxima, first_argmax, largest, members, top_columns

SIZES = [1, 2, 63, 64, 65, 127, 128, 129, 1000, 4096, 5003]


def numbers(rows: int, size: int, *, distinct: int) -> Tensor:
    """Few distinct values make ties, within blocks and across them."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(-distinct, distinct, (rows, size), generator=generator).float() / 4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("distinct", [2, 50, 10**6])
def test_block_search_finds_what_a_sort_finds(size, distinct):
    x = numbers(5, size, distinct=distinct)
    maxima = block_maxima(x)
    expected = torch.sort(x, dim=-1, descending=True, stable=True)
    assert torch.equal(first_argmax(x, maxima), expected.indices[:, 0])
    for count in {1, 2, 20, 300, size} & {*range(size + 1)}:
        assert torch.equal(largest(x, maxima, count), expected.values[:, :count])
        assert torch.equal(top_columns(x, maxima, count), expected.indices[:, :count])


@pytest.mark.parametrize("size", SIZES)
def test_members_of_all_blocks_are_all_numbers_and_nothing_else(size):
    x = numbers(3, size, distinct=1000)
    blocks = torch.arange(-(-size // 64)).expand(3, -1)
    values, columns = members(x, blocks)
    assert torch.equal(values[:, :size], x)
    assert columns[:, :size].tolist() == [[*range(size)]] * 3
    assert bool((values[:, size:] == -torch.inf).all())
    assert int(columns.max()) < size


def test_rows_of_minus_infinity_and_the_two_zeros_are_ordered_by_column():
    x = torch.full((1, 130), -torch.inf)
    assert first_argmax(x, block_maxima(x)).item() == 0
    x[0, 70], x[0, 129], x[0, 65] = 0.0, -0.0, -0.0
    assert first_argmax(x, block_maxima(x)).item() == 65
    assert top_columns(x, block_maxima(x), 4).tolist() == [[65, 70, 129, 0]]


@pytest.mark.parametrize("at", [0, 63, 64, 129])
def test_nan_shows_in_its_blocks_maximum(at):
    x = torch.zeros(2, 130)
    x[1, at] = torch.nan
    assert block_maxima(x).isnan().any(-1).tolist() == [False, True]
