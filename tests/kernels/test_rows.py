"""Row counts: what is measured, padded and cut, on made-up products whose bits depend on how many rows they get."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.rows import COUNTS, TILE, RowCounts, cancelling


class Moody:
    """Doubles its rows, and adds a little whenever there are not as many as it likes. Remembers what it was given."""

    def __init__(self, likes: Callable[[int], bool]) -> None:
        self.likes, self.given = likes, list[int]()

    def __call__(self, x: Tensor) -> Tensor:
        self.given.append(len(x))
        return x * 2 if self.likes(len(x)) else x * 2 + len(x) * 2.0**-20


def numbers(rows: int) -> Tensor:
    return torch.arange(1.0, rows + 1)[:, None].expand(-1, 3).clone()


def measure(likes: Callable[[int], bool], rows: int = COUNTS[-1]) -> RowCounts:
    return RowCounts.measure(Moody(likes), numbers(rows))


@pytest.mark.parametrize("liked", [COUNTS, (1, 16), (4, 8, 16, 64), (16,), (2, 3, 5, 7, 16, 1024)], ids=str)
def test_exactly_the_counts_that_agree_are_found(liked):
    assert measure(lambda rows: rows in liked).agreeing == sorted(liked)


def test_no_more_rows_are_tried_than_there_are():
    product = Moody(lambda rows: True)
    assert RowCounts.measure(product, numbers(128)).agreeing[-1] == 128
    assert max(product.given) == 128
    assert RowCounts.measure(product, numbers(200)).agreeing[-1] == 192
    assert RowCounts.measure(product, numbers(TILE)).agreeing[-1] == TILE


def test_a_difference_in_a_later_group_of_rows_is_seen():
    """Two orders of accumulation agree on most content: each count is tried on several groups of rows."""

    def picky(x: Tensor) -> Tensor:
        return x * 2 + (1 if len(x) == 8 and 20 in x[:, 0] else 0)

    assert 8 not in RowCounts.measure(picky, numbers(1024)).agreeing
    assert 7 in RowCounts.measure(picky, numbers(1024)).agreeing


@pytest.mark.parametrize(
    ("agreeing", "rows", "pieces"),
    [
        (COUNTS, 1, [1]),
        (COUNTS, 9, [10]),
        (COUNTS, 17, [20]),
        (COUNTS, 33, [40]),
        (COUNTS, 64, [64]),
        (COUNTS, 65, [64, 1]),
        (COUNTS, 440, [384, 64]),
        (COUNTS, 2500, [1024, 1024, 384, 64, 4]),
        ((16,), 1, [16]),
        ((16,), 40, [16, 16, 16]),
        ((4, 16), 5, [16]),
        ((4,), 5, [16]),
        ((4, 16, 128), 259, [128, 128, 4]),
        ((16, 128), 33, [128]),
        (COUNTS, 0, []),
    ],
)
def test_rows_are_cut_into_counts_that_agree_and_the_last_is_padded(agreeing, rows, pieces):
    assert RowCounts(agreeing).pieces(rows) == pieces


@pytest.mark.parametrize("agreeing", [COUNTS, (16,), (1, 8, 16, 40, 48), (4, 20, 128)], ids=str)
def test_whole_tiles_are_cut_without_padding(agreeing):
    counts = RowCounts(agreeing)
    for rows in range(TILE, 3000, TILE):
        pieces = counts.cut(rows)
        assert sum(pieces) == rows
        assert set(pieces) <= set(counts.agreeing)


MOODS = {
    "likes all": lambda rows: True,
    "likes tiles": lambda rows: rows % TILE == 0,
    "likes tiles to 128": lambda rows: rows % TILE == 0 and rows <= 128,
    "likes its tile only": lambda rows: rows == TILE,
    "likes even": lambda rows: rows % 2 == 0,
    "likes few and tiles": lambda rows: rows in (1, 4, 8) or rows % TILE == 0,
    "likes all up to 48": lambda rows: rows <= 48,
    "dislikes one row": lambda rows: rows != 1,
}


@pytest.mark.parametrize("mood", MOODS)
def test_each_row_has_the_same_bits_in_any_batch_whatever_the_product_likes(mood):
    counts = measure(MOODS[mood])
    for rows in (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 100, 128, 129, 300, 1024, 1025, 2500):
        x = numbers(rows)
        product = Moody(MOODS[mood])
        assert torch.equal(counts.apply(product, x), x * 2), rows
        assert all(MOODS[mood](given) for given in product.given)


def test_inputs_of_a_count_that_agrees_are_neither_padded_nor_copied():
    seen: list[Tensor] = []

    def look(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows

    x = numbers(8)
    RowCounts((8, 16)).apply(look, x)
    assert seen[0] is x


def test_padding_rows_are_zeros_and_never_come_back():
    seen: list[Tensor] = []

    def look(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows + 1

    out = RowCounts((16,)).apply(look, numbers(5))
    assert torch.equal(out, numbers(5) + 1)
    assert torch.equal(seen[0][5:], torch.zeros(11, 3))


def test_rows_of_more_than_one_axis_are_padded_along_the_first():
    x = torch.randn(5, 2, 3)
    assert torch.equal(RowCounts((16,)).apply(lambda rows: rows * 2, x), x * 2)


def test_two_products_share_the_counts_that_agree_for_both():
    both = RowCounts((1, 2, 4, 16, 128)).both(RowCounts((2, 3, 4, 128, 512)))
    assert both.agreeing == [2, 4, 16, 128]


# -- sums that cancel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 8, 33, 64, 255, 576])
def test_cancelling_sums_are_zero_in_exact_arithmetic(width, dtype):
    x, w = cancelling(20, 11, width, dtype, torch.device("cpu"))
    assert (x.shape, w.shape, x.dtype, w.dtype) == ((20, width), (11, width), dtype, dtype)
    # A product of two float32 numbers is exact in float64, and fsum adds exactly.
    for row in x.double():
        for column in w.double():
            assert math.fsum((row * column).tolist()) == 0.0


@pytest.mark.parametrize("width", [64, 255, 576])
def test_cancelling_sums_show_nothing_but_the_order_of_accumulation(width):
    x, w = cancelling(32, 40, width, torch.float32, torch.device("cpu"))
    forwards, backwards = torch.zeros(32, 40), torch.zeros(32, 40)
    for index in range(width):
        forwards += x[:, index, None] * w[:, index]
        backwards += x[:, -1 - index, None] * w[:, -1 - index]
    assert (forwards != backwards).float().mean() > 0.5
    assert forwards.abs().max() < 1e-3


def test_cancelling_sums_are_the_same_each_time():
    first, second = (cancelling(4, 5, 6, torch.float32, torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
