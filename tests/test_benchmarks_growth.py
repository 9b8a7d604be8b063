"""The benchmark of a step's growth runs, counts its bytes, and draws."""

from pathlib import Path

import pytest

from benchmarks import growth
from benchmarks.random_model import make_engine


def test_growth_of_a_step_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    growth.main(["--quick", "--steps", "1", "--threads", "1", "--plot", str(tmp_path / "growth.png")])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-6:]] == [
        ["1", "32"], ["4", "32"], ["1", "16"], ["1", "64"], ["2", "16"], ["2", "64"],
    ]  # fmt: skip
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_growth_counts_what_a_step_reads() -> None:
    engine = make_engine(
        "tiny", on_device=False, device="cpu", dtype="float32", kv_blocks=8, max_sequences=2, threads=1
    )
    one, two = (growth.measure(engine.runner, batch, 32, 1).read for batch in (1, 2))
    assert two - one == 32 * 2 * 2 * 2 * 32 * 4  # tokens, K and V, layers, heads, head size, bytes
    assert one - (two - one) == engine.runner.weight_bytes
