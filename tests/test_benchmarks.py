"""The benchmark runs, and judges by its numbers. What it measures is worth nothing here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import models

ROOT = Path(__file__).resolve().parent.parent


def test_engine_benchmark_measures_both_sides_and_judges(tmp_path: Path) -> None:
    models.save(tmp_path, "llama")
    command = [sys.executable, "-m", "benchmarks.engine", "--quick", "--rounds", "1", "--threads", "1", "--json", "-"]
    done = subprocess.run(
        [*command, "--model", str(tmp_path)], cwd=ROOT, check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["environment"]["threads"] == 1
    assert all(len(values) == 1 and values[0] > 0 for values in report["results"].values())
    sides = {"gllm", "transformers one by one", "transformers static batch"}
    assert all(any(side in name for name in report["results"]) for side in sides)
    marks = {mark["name"]: mark for mark in report["marks"]}
    by_memory = marks["memory beyond weights and KV pool (MB)"]
    assert by_memory["met"] == (by_memory["got"] <= 700)
    sooner = next(mark for name, mark in marks.items() if "sooner" in name)
    off, on = (report["results"][f"second job starts, cache {state} (s)"][0] for state in ("off", "on"))
    assert sooner["got"] == pytest.approx(off / on)
    assert sooner["met"] == (off / on >= 5)


def test_benchmark_can_be_started_by_its_path() -> None:
    """Its own name is that of the package it measures."""
    command = [sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--help"]
    done = subprocess.run(command, cwd="/", check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout
