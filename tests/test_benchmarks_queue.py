"""The queue's benchmark runs, and judges by its numbers. What it measures is worth nothing here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import binaries

ROOT = Path(__file__).resolve().parent.parent
ONE = "an XADD per token, awaited one by one"
needs_a_server = pytest.mark.skipif(not binaries(), reason="no server is installed")


def quick(*options: str) -> dict[str, dict[str, dict]]:
    """The figures of a quick run by section and name."""
    command = [sys.executable, "-m", "benchmarks.queue", "--quick", "--rounds", "1", "--json", "-", *options]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["environment"]["server"]
    return {section: {figure["name"]: figure for figure in figures} for section, figures in report["results"].items()}


@needs_a_server
def test_queue_benchmark_starts_jobs_and_compares_with_plain_writers() -> None:
    found = quick("--only", "long,start,plain")

    assert list(found) == ["long", "start", "plain"]
    assert found["long"]["a prompt of 20,000 bytes, from submission to its end, median"]["value"] > 0
    start = found["start"]["from claim to start event, median"]
    assert start["limit"] == 5.0
    assert start["met"] == (0 < start["value"] <= 5.0)
    assert all(figure["value"] >= 0 for figure in found["plain"].values())
    ours, plain = (found["plain"][f"{name}: Redis' memory, a token"]["value"] for name in ("fenced, exactly once", ONE))
    assert found["plain"][f"memory, fenced, exactly once / {ONE}"]["value"] == pytest.approx(ours / plain)


@needs_a_server
@pytest.mark.slow
def test_queue_benchmark_measures_latency_recovery_and_balance() -> None:
    found = quick("--only", "latency,sustained,recovery,balance")

    assert found["latency"]["from engine to client, 4 streams, median"]["limit"] == 2.0
    assert found["sustained"]["8 streams"]["value"] > 200
    (recovered,) = found["recovery"].values()
    assert recovered["limit"] == 0.5 + 2.0
    assert recovered["met"] == (0 < recovered["value"] <= 2.5)
    assert found["balance"]["1 worker, 40 jobs: most / mean - 1"]["value"] == 0
    assert found["balance"]["2 workers, 40 jobs: time"]["value"] > 0


def test_queue_benchmark_can_be_started_by_its_path() -> None:
    """Its own name is that of a module of Python's."""
    command = [sys.executable, str(ROOT / "benchmarks" / "queue.py"), "--help"]
    done = subprocess.run(command, cwd="/", check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout
