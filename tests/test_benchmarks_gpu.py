"""The GPU session: all of it runs dry, no failure loses what others found, and its checks see wrong kernels."""

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.gpu import exact, host_time
from benchmarks.gpu.cases import DRY_SHAPES, Maker, worst_row
from benchmarks.gpu.correctness import check
from benchmarks.gpu.end_to_end import workload
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line, Stage, as_json, read_lines, table
from benchmarks.gpu.session import GRACE, PLANS, WHOLE, Plan, failures, run_apart, run_here
from kernels import TorchBackend, reference

ROOT = Path(__file__).resolve().parent.parent
MACHINE = Machine(dry=True, deadline=float("inf"))
WRITES = 'import sys; open(sys.argv[1], \'w\').write(\'{"name": "one"}\\n{"name": "two", "value": 2.0}\\n{"nam\');'


def maker(seed: int = 1) -> Maker:
    return Maker(MACHINE, MACHINE.backend(), DRY_SHAPES["tiny"], seed)


def test_gpu_session_runs_dry_with_every_stage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert list(stages) == list(PLANS)
    assert {stage["ended"] for stage in stages.values()} == {"done"}
    lines = {line["name"]: line for stage in stages.values() for line in stage["lines"]}
    assert lines["engine: tokens as on a CPU"]["ok"]
    assert lines["engine: launches without waiting"]["ok"]
    assert lines["tiny: mixed, windowed"]["ok"]
    assert lines["tiny: the same bits, attention"]["ok"]
    assert lines["tiny: step, batch 2"]["value"] > 0
    assert lines["engine: replayed graphs"]["ok"]
    assert lines["engine: tokens by graphs"]["ok"]
    assert lines["tiny: step without graphs, batch 1"]["value"] > 0
    assert lines["transformers, sdpa, 3 requests of 4 tokens"]["value"] > 0
    assert done.stdout.strip().endswith("0 failures")
    assert (tmp_path / "table.txt").read_text().strip() in done.stdout


@pytest.mark.parametrize("window", [None, 5])
def test_gpu_cases_of_prepared_batches_are_right_in_plain_torch(window: int | None) -> None:
    cases = Maker(MACHINE, TorchBackend(deterministic=True), DRY_SHAPES["tiny"], 1)
    for counts, lengths in (([1, 9, 1], [30, 9, 1]), ([1, 1, 1], [17, 16, 40])):
        assert check(MACHINE, "x", lambda c=counts, n=lengths: cases.prepared(c, n, window))[0].ok


def test_gpu_host_time_is_of_steps_that_compute_nothing() -> None:
    cost = host_time.measure(2)
    assert 0 < cost.greedy < 5
    assert min(cost.sampled, cost.blocks) > 0


def test_gpu_session_has_at_most_eight_minutes() -> None:
    assert WHOLE + GRACE <= 480
    assert sum(plan.seconds for plan in PLANS.values()) <= WHOLE


def test_gpu_stage_that_hangs_is_stopped_and_keeps_what_it_said(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    command = [sys.executable, "-c", WRITES + "import time; time.sleep(100)", str(path)]
    began = time.monotonic()
    stage = run_apart("x", command, path, 1.5 - GRACE)
    assert time.monotonic() - began < 30
    assert stage.ended.startswith("stopped after")
    assert [line.name for line in stage.lines] == ["one", "two"]


def test_gpu_stage_that_dies_says_how_and_keeps_what_it_said(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    stage = run_apart("x", [sys.executable, "-c", WRITES + "raise ValueError('no such thing')", str(path)], path, 30)
    assert stage.ended == "failed with 1: ValueError: no such thing"
    assert [line.name for line in stage.lines] == ["one", "two"]
    assert [line.said for line in failures([stage])] == [stage.ended]


def test_gpu_stage_that_raises_keeps_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaking_stage.py").write_text(
        "from benchmarks.gpu.report import Line\n"
        "def stage(machine):\n    yield Line(name='one')\n    raise OSError('gone')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PLANS, "breaking", Plan("breaking_stage", 1))
    stage = run_here("breaking", tmp_path / "x.jsonl", dry=True, seconds=1, ceilings=tmp_path / "none")
    assert stage.ended == "failed: OSError: gone"
    assert [line.name for line in stage.lines] == ["one"]


def test_gpu_attempt_turns_failures_into_lines_and_skips_what_has_no_time() -> None:
    def work() -> list[Line]:
        raise RuntimeError("an illegal memory access")

    (failed,) = MACHINE.attempt("x", work)
    assert (failed.ok, failed.said) == (False, "RuntimeError: an illegal memory access")
    (skipped,) = Machine(dry=True, deadline=time.monotonic() + 3).attempt("x", work, 5)
    assert (skipped.ok, skipped.said) == (None, "skipped: 3 s left")


def test_gpu_lines_know_their_share_of_a_bound() -> None:
    slow = Line(name="kernel", value=40.0, unit="us", bound=30.0, target=0.85)
    rate = Line(name="tokens", value=90.0, unit="tok/s", bound=100.0, target=0.85)
    assert (slow.share, slow.met, rate.share, rate.met) == (0.75, False, 0.9, True)
    wrong, right, plain = Line(name="a", ok=False), Line(name="b", ok=True), Line(name="c", value=1.0)
    assert (wrong.met, right.met, plain.met, plain.share) == (False, True, None, None)
    stage = Stage(name="s", ended="done", seconds=1.0, lines=[slow, wrong])
    assert "75% of 30" in table({"gpu": "none"}, [stage])
    assert "NOT MET" in slow.text()
    assert "FAILED" in wrong.text()
    assert json.loads(as_json({}, [stage]))["stages"][0]["lines"][0]["share"] == 0.75
    assert failures([stage]) == [wrong]  # a target that is missed is no failure


def test_gpu_lines_are_read_up_to_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert read_lines(path) == []
    path.write_bytes(msgspec.json.encode(Line(name="one", value=1.0)) + b'\n{"name": "tw')
    assert read_lines(path) == [Line(name="one", value=1.0)]


@pytest.mark.parametrize("change", [1.01, float("nan")])
def test_gpu_correctness_sees_a_wrong_row(monkeypatch: pytest.MonkeyPatch, change: float) -> None:
    cases = maker()
    assert check(MACHINE, "norm", lambda: cases.norm(5))[0].ok
    norm = cases.backend.rms_norm

    def wrong(*arguments: object) -> torch.Tensor:
        out = norm(*arguments)
        out[3] *= change
        return out

    monkeypatch.setattr(cases.backend, "rms_norm", wrong)
    assert check(MACHINE, "norm", lambda: cases.norm(5))[0].ok is False


def test_gpu_float64_references_mean_what_the_references_mean() -> None:
    for window, softcap in ((None, None), (7, None), (None, 2.0)):
        case = maker(3).attention([1, 9, 3], [40, 9, 20], window, softcap)
        q, kv, tables, counts, lengths, *_ = case.exact.args
        right = reference.attention(q, kv, tables, counts, lengths, q.shape[2] ** -0.5, window, softcap)
        assert worst_row(right, case.exact()) < 1e-5
    gates, x, weight = torch.randn(3, 8), torch.randn(3, 4, 8), torch.randn(8)
    assert worst_row(reference.silu_mul(gates), exact.silu_mul(gates)) < 1e-6
    assert worst_row(reference.gelu_mul(gates), exact.gelu_mul(gates)) < 1e-6
    assert worst_row(reference.rms_norm(x, weight, 1e-6), exact.rms_norm(x, weight, 1e-6)) < 1e-6
    angles = torch.randn(3, 4)
    assert worst_row(reference.rope(x, angles.cos(), angles.sin()), exact.rope(x, angles)) < 1e-6


def test_gpu_workload_is_the_one_that_others_measure() -> None:
    prompts, news = workload(256, 1024)
    assert (sum(map(len, prompts)), sum(news)) == (142_827, 133_966)


def test_gpu_session_needs_the_engine_and_torch_only(tmp_path: Path) -> None:
    """The GPU machine has little else; transformers is looked for by the stage that compares with it."""
    blocked = [
        "transformers",
        "redis",
        "click",
        "structlog",
        "tokenizers",
        "gguf",
        "jinja2",
        "gllm",
        "worker",
        "psutil",
    ]
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Blocked())
from benchmarks.gpu_session import main
sys.exit(main(["--dry", "--out", {str(tmp_path)!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not built: No module named 'transformers'" in done.stdout
