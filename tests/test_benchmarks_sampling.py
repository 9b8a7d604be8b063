"""The sampling benchmark runs and writes what it shows. What it measures is worth nothing here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_sampling_benchmark_measures_every_parameter_set_beside_a_step(tmp_path: Path) -> None:
    options = [
        "--quick",
        "--batches",
        "1",
        "2",
        "--logits",
        "peaked",
        "--threads",
        "1",
        "--json",
        str(tmp_path / "r.json"),
    ]
    command = [sys.executable, "-m", "benchmarks.sampling", *options]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    names = {row["parameters"] for row in report["rows"]}
    assert len(report["rows"]) == 2 * len(names) == 22
    for row in report["rows"]:
        assert row["share"] * report["step_ms"][str(row["batch"])] == pytest.approx(row["ms"])
        assert (row["torch_ms"] is not None) == (row["parameters"] in {"greedy", "temperature", "top_k", "top_p"})
    assert all(name in done.stdout for name in names)
