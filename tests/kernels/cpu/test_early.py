"""Kernels that are compiled while a worker imports: who begins, who waits, who tells of a failure, who ends it."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine import early
from kernels import AttentionBatch, Heads
from kernels.cpu import build, cache, levels, library
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import Library, Missing
from tests.kernels.cpu.slow_compiler import Slow, wait_until

BEST = levels.usable()[0]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that has loaded nothing, and an empty cache."""
    if any(cache.BUILT.glob("*.so")):
        pytest.skip("kernels were built ahead")
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(library, "SIGNATURES", {})
    monkeypatch.setattr(early, "GPU_FILES", ())
    monkeypatch.setenv("GLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def slow(a_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slow:
    made = Slow(tmp_path, a_compiler)
    monkeypatch.setenv("CXX", str(made.path))
    return made


def test_what_workers_begin_to_compile_is_compiled_once_and_waited_for(empty, slow):
    begun = [early.begin("auto", "auto", "auto") for _ in range(3)]
    wait_until(lambda: slow.calls)
    told, found = list[str](), list[object]()
    waiting = threading.Thread(target=lambda: found.append(library.load(told.append, dtype="bfloat16")))
    waiting.start()
    wait_until(lambda: told)
    assert waiting.is_alive()
    slow.open()
    waiting.join(30)
    assert isinstance(found[0], Library)
    assert (found[0].path.name, found[0].dtype) == (build.file_name(BEST, "bfloat16"), "bfloat16")
    assert told == [f"the CPU kernels for {BEST.name}"]
    assert [process.wait(30) for process in begun if process] == [0, 0, 0]
    assert len([call for call in slow.calls if "-c" in call]) == 2, "bfloat16's attention, and all else together"
    assert len(slow.calls) == 3
    assert all("float32" not in " ".join(call) for call in slow.calls)


def test_nothing_is_compiled_early_where_a_library_serves_already(empty, slow):
    slow.open()
    build.compile_level(BEST, empty)
    count = len(slow.calls)
    process = early.begin("cpu", "float32", "cpu")
    assert process is not None
    assert process.wait(30) == 0
    assert len(slow.calls) == count


def test_early_compilation_that_fails_is_told_of_by_who_needs_it(empty, tmp_path, monkeypatch, capfd):
    broken = tmp_path / "broken-cxx"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of order' >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    process = early.begin("cpu", "auto", "cpu")
    assert process is not None
    assert process.wait(30) == 1
    assert capfd.readouterr() == ("", "")
    found = library.load(dtype="bfloat16")
    assert isinstance(found, Missing)
    assert found.reason == f"{broken} failed with status 3: x.cpp:1: error: out of order"


def test_early_compilation_has_no_place_to_be_kept_without_a_cache_folder(empty, slow):
    empty.parent.write_text("a file")
    process = early.begin("cpu", "auto", "cpu")
    assert process is not None
    assert process.wait(30) == 1
    assert slow.calls == []


def test_compilers_end_with_who_began(empty, slow):
    code = "import time; from engine import early; early.begin('cpu', 'auto', 'cpu'); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as worker:
        wait_until(lambda: len(slow.running) == 2)
        assert list(empty.glob(f"{cache.SCRATCH}*"))
        worker.kill()
    wait_until(lambda: not slow.running)
    wait_until(lambda: not list(empty.glob(f"{cache.SCRATCH}*")))
    slow.open()
    assert isinstance(library.load(dtype="bfloat16"), Library), "the lock is free"


def test_compilers_that_do_not_end_by_themselves_are_ended(empty, slow):
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwork, real"
    slow.path.write_text(slow.path.read_text().replace("work, real", deaf, 1))
    process = early.begin("cpu", "auto", "cpu")
    assert process is not None
    assert process.stdin is not None
    wait_until(lambda: len(slow.running) == 2)
    process.stdin.close()
    wait_until(lambda: not slow.running, seconds=20)


@pytest.mark.parametrize(
    "asked",
    [
        ("cpu", "auto", "torch"),
        ("auto", "bfloat16", "triton"),
        ("cuda", "auto", "auto"),
        ("cuda", "auto", "cpu"),
        ("cpu", "float16", "auto"),
    ],
    ids="-".join,
)
def test_nothing_is_compiled_early_that_may_not_be_needed(asked, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    assert early.begin(*asked) is None


def test_nothing_is_compiled_early_on_a_machine_that_shows_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setattr(early, "GPU_FILES", (tmp_path / "none", tmp_path))
    assert early.begin("auto", "auto", "auto") is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", build.DTYPES)
def test_a_library_of_one_dtype_has_the_bits_of_the_whole_one(cpu, dtype, tmp_path):
    part = Library(BEST, build.compile_level(BEST, tmp_path, dtype=dtype), dtype)
    assert part.numerics == cpu.library.numerics
    one = CpuBackend(part, deterministic=True, threads=2)
    weight, x = (torch.randn(shape).to(getattr(torch, dtype)) for shape in ((96, 80), (5, 80)))
    assert torch.equal(one.prepare_linear(weight)(x), cpu.prepare_linear(weight)(x))
    kv, q = torch.randn(2, 4, 2, 16, 64).to(x.dtype), torch.randn(40, 4, 64).to(x.dtype)
    batch = AttentionBatch([40], [40], torch.arange(4)[None], 16, Heads(2, 2))
    assert torch.equal(one.attention(q, kv, batch, 0.125), cpu.attention(q, kv, batch, 0.125))
