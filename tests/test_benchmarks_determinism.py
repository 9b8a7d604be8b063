"""The benchmark of determinism's cost runs. What it measures is worth nothing here."""

import json
import subprocess
import sys
from pathlib import Path

from tests.engine import models

ROOT = Path(__file__).resolve().parent.parent


def test_determinism_is_measured_in_products_and_in_the_engine(tmp_path: Path) -> None:
    models.save(tmp_path, "llama", max_position_embeddings=2048)
    command = [sys.executable, "-m", "benchmarks.determinism", "--rounds", "1", "--threads", "1", "--json", "-"]
    done = subprocess.run(
        [*command, "--model", str(tmp_path)], cwd=ROOT, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = {figure["name"]: figure["value"] for figure in report["results"]}
    assert all(value > 0 for value in found.values())
    assert {"products of 5 rows, tiles of 16 rows / stock", "prefill of 1024, time with / without"} <= set(found)
    with_it, without = found["decode, batch of 8, deterministic"], found["decode, batch of 8, not"]
    assert abs(found["decode, batch of 8, time with / without"] - without / with_it) < 1e-9
