"""The kernels' benchmark runs, on each level. What it measures is worth nothing here."""

import statistics

import pytest

from benchmarks import kernels_cpu, quantized
from tests.kernels.cpu.conftest import LEVELS


def test_kernels_benchmark_prints_bounds_shares_and_the_neighbour(capsys, monkeypatch):
    monkeypatch.setattr(kernels_cpu, "SHAPES", {"small": (64, 96)})
    monkeypatch.setattr(kernels_cpu, "BYTES_AT_LEAST", 1)
    assert kernels_cpu.main(["--quick", "--threads", "2", "--level", LEVELS[-1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("read ") and "GFLOP/s" in line for line in lines)
    assert [line.split()[0] for line in lines if line.endswith("% ")] == ["1", "16"]
    assert "beside a process on one core" in lines[-1]


def test_kernels_benchmark_says_which_kernels_are_missing(capsys):
    assert kernels_cpu.main(["--level", "abacus"]) == 1
    assert capsys.readouterr().err == "no C++ kernels: this processor cannot run the level abacus\n"


@pytest.mark.slow
def test_a_busy_neighbour_slows_a_step_in_proportion():
    """Tiles are handed out one by one and nobody spins for long: half a core less is not ten times the time."""
    library = kernels_cpu.load()
    if isinstance(library, kernels_cpu.Missing) or kernels_cpu.physical_cores() < 2:
        pytest.skip("two cores and the C++ kernels are needed")
    bench = kernels_cpu.Bench(library, 2, 0.1)
    alone, beside = map(statistics.median, kernels_cpu.beside_neighbour(bench, turns=3, seconds=1.0))
    assert beside < 4 * alone, (alone, beside)


@pytest.mark.slow
def test_eight_bits_cost_next_to_no_quality_and_four_some():
    """SmolLM2-135M's perplexity of one passage: 18.87 in bfloat16 and in 8 bits, 22.7 in 4, when this was written."""
    full, half, eight, four = quantized.measure("smollm2", 512)
    assert abs(half.perplexity / full.perplexity - 1) < 0.01
    assert abs(eight.perplexity / half.perplexity - 1) < 0.01
    assert half.perplexity < four.perplexity < 1.35 * half.perplexity
    assert four.bytes < eight.bytes < 0.54 * half.bytes
