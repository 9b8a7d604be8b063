"""The largest numbers by the C++ kernels, against torch's way to them."""

import pytest
import torch

from kernels import best
from kernels.cpu.backend import CpuBackend
from tests.kernels.cpu.conftest import every_level


@every_level
@pytest.mark.parametrize("columns", [1, 5, 63, 64, 65, 129, 1000, 4096, 40961])
def test_the_best_are_torchs_in_every_block_and_row(cpu: CpuBackend, columns: int):
    for rows, distinct in ((1, 10**6), (3, 4), (9, 50)):
        generator = torch.Generator().manual_seed(columns + rows)
        x = torch.randint(-distinct, distinct, (rows, columns + 7), generator=generator).float()[:, :columns] / 4
        x[0] = -torch.inf
        maxima, ids = cpu.best(x)
        expected = best(x)
        assert torch.equal(maxima, expected[0])
        assert torch.equal(ids, expected[1])


@every_level
@pytest.mark.parametrize("at", [0, 3, 63, 64, 70, 129])
def test_not_a_number_shows_in_its_blocks_maximum_and_an_infinity_is_found(cpu: CpuBackend, at: int):
    x = torch.zeros(3, 130)
    x[1, at], x[2, at] = torch.nan, torch.inf
    maxima, ids = cpu.best(x)
    assert maxima.isnan().any(1).tolist() == [False, True, False]
    assert maxima[1, at // 64].isnan()
    assert ids[2] == at
    assert ids[0] == 0
    assert 0 <= int(ids[1]) < 130


def test_the_two_zeros_are_equal_and_the_first_is_taken(cpu: CpuBackend):
    x = torch.full((1, 200), -1.0)
    x[0, 150], x[0, 70] = 0.0, -0.0
    assert cpu.best(x)[1].item() == 70
