"""How the C++ kernels are found, compiled, kept and refused."""

import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu import build, cache, levels, library, threads
from kernels.cpu.compile import main as compile_ahead
from kernels.cpu.library import Library, Missing

BEST = levels.usable()[0]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that has loaded nothing, an empty cache, and nothing built ahead."""
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(cache, "BUILT", tmp_path / "built")
    monkeypatch.setenv("GLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sources that compile at once."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" const char* gllm_build() { return GLLM_BUILD; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(library, "SIGNATURES", {})
    build.source_digest.cache_clear()
    monkeypatch.setattr(library, "_loaded", {})
    yield
    build.source_digest.cache_clear()


def test_kernels_are_compiled_once_and_then_found(empty, small, monkeypatch):
    told: list[str] = []
    first = library.load(told.append)
    assert isinstance(first, Library)
    assert told == [f"the CPU kernels for {BEST.name}"]
    assert first.path.parent == empty / "cache" / "kernels"
    assert stat.S_IMODE(first.path.parent.stat().st_mode) == 0o700
    assert {*os.listdir(first.path.parent)} == {first.path.name, f".{first.path.name}.lock"}, "scratch is left behind"
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(build, "compiler", lambda: pytest.fail("compiled again"))
    again = library.load(told.append)
    assert isinstance(again, Library)
    assert (again.path, again.numerics, len(told)) == (first.path, first.numerics, 1)


def test_of_several_workers_that_start_at_once_one_compiles(empty, small, monkeypatch):
    started, run = list[list[str]](), build._run
    monkeypatch.setattr(build, "_run", lambda command: (started.append(command), run(command)))
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: build.compile_level(BEST, empty / "shared"), range(8)))
    assert len(set(paths)) == 1
    assert len(started) == 2, "more than one compile and one link"
    assert Library(BEST, paths[0]).numerics == f"{BEST.name}-{build.source_digest()}"


@pytest.mark.parametrize("damage", [b"", b"\x7fELF no more", b"text"], ids=["empty", "cut", "text"])
def test_a_broken_file_in_the_cache_is_replaced(empty, small, damage):
    path = empty / "cache" / "kernels" / build.file_name(BEST)
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    assert isinstance(library.load(), Library)
    assert path.stat().st_size > 1000


def test_a_compilation_removes_the_oldest_builds_and_nothing_else(empty, small):
    folder = empty / "cache" / "kernels"
    folder.mkdir(mode=0o700, parents=True)
    names = [f"gllm-cpu-generic-{number:016x}.so" for number in range(cache.KEPT + 1)]
    for age, name in enumerate(names):
        for path in (folder / name, folder / f".{name}.lock"):
            path.write_bytes(b"")
            os.utime(path, (1e9 - age, 1e9 - age))
    (folder / "notes.txt").write_text("somebody's")
    found = library.load()
    assert isinstance(found, Library)
    kept = {found.path.name, *names[: cache.KEPT - 1]}
    assert {path.name for path in folder.glob("*.so")} == kept
    assert {path.name for path in folder.glob(".*.lock")} == {f".{name}.lock" for name in kept}
    assert (folder / "notes.txt").exists()


def test_a_library_of_other_sources_is_not_taken(empty, small):
    path = build.compile_level(BEST, empty)
    renamed = path.rename(empty / "other.so")
    (build.SOURCES / "one.cpp").write_text('extern "C" const char* gllm_build() { return GLLM_BUILD; } // new\n')
    build.source_digest.cache_clear()
    with pytest.raises(OSError, match=f"build {BEST.name}-.* expected, it is {BEST.name}-"):
        Library(BEST, renamed)


def test_without_a_compiler_the_reason_is_one_line(empty, small, monkeypatch):
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("CXX", raising=False)
    found = library.load()
    assert isinstance(found, Missing)
    assert found.reason == "no C++ compiler: none of $CXX, c++, g++ and clang++ is installed"


def test_without_a_compiler_a_lower_level_that_was_built_ahead_serves(empty, small, monkeypatch):
    if BEST.name == "generic":
        pytest.skip("this processor has one level only")
    assert compile_ahead(["--levels", "generic", "--output", str(cache.BUILT)]) == 0
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("CXX", raising=False)
    found = library.load()
    assert isinstance(found, Library)
    assert (found.level.name, found.path.parent) == ("generic", cache.BUILT)


def test_all_levels_of_the_machine_are_compiled_ahead_also_those_that_cannot_run_here(empty, small, capsys):
    assert compile_ahead(["--levels", "all", "--output", str(empty / "out")]) == 0
    built = {path.name for path in (empty / "out").glob("*.so")}
    assert built == {build.file_name(level) for level in levels.of_this_machine()}
    assert "generic" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compile_ahead(["--levels", "abacus"])
    assert "any of avx512bf16,avx512,avx2,generic, expected, got 'abacus'" in capsys.readouterr().err


def test_a_broken_compiler_is_named_with_its_first_error(empty, small, monkeypatch):
    broken = empty / "broken-cxx"
    broken.write_text("#!/bin/sh\necho 'warm up' >&2; echo 'x.cpp:1: error: out of order' >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    found = library.load()
    assert isinstance(found, Missing)
    assert found.reason == f"{broken} failed with status 3: x.cpp:1: error: out of order"


def test_a_compiler_that_makes_nothing_is_a_reason_too(empty, small, monkeypatch):
    lazy = empty / "lazy-cxx"
    lazy.write_text("#!/bin/sh\nexit 0\n")
    lazy.chmod(0o755)
    monkeypatch.setenv("CXX", str(lazy))
    found = library.load()
    assert isinstance(found, Missing)
    assert "No such file" in found.reason


def test_a_folder_that_others_may_write_to_is_not_loaded_from(empty, monkeypatch):
    (empty / "cache").mkdir()
    (empty / "cache").chmod(0o777)
    assert list(cache.folders()) == [cache.BUILT]
    (empty / "cache").chmod(0o755)
    assert list(cache.folders()) == [cache.BUILT, empty / "cache" / "kernels"]


def test_without_a_cache_folder_kernels_are_compiled_for_this_process_alone(empty, small, monkeypatch):
    (empty / "cache").write_text("a file")
    (empty / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(empty / "temporary"))
    found = library.load()
    assert isinstance(found, Library)
    assert found.path.parent.parent == empty / "temporary"
    assert not os.listdir(empty / "temporary"), "every start would leave one"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"GLLM_CACHE": "a", "XDG_CACHE_HOME": "b", "HOME": "c"}, "a/kernels"),
        ({"XDG_CACHE_HOME": "b", "HOME": "c"}, "b/gllm/kernels"),
        ({"HOME": "c"}, "c/.cache/gllm/kernels"),
        ({"XDG_CACHE_HOME": "file", "HOME": "c"}, "c/.cache/gllm/kernels"),
        ({}, "temporary/gllm-kernels-{uid}"),
    ],
    ids=["own", "xdg", "home", "unusable", "none"],
)
def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch, variables, expected):
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    for name in ("GLLM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert list(cache.folders())[1:] == [tmp_path / expected.format(uid=os.geteuid())]


def test_the_digest_follows_every_source_and_flag(small, monkeypatch):
    before = build.source_digest()
    (build.SOURCES / "more.h").write_text("// a header\n")
    build.source_digest.cache_clear()
    after = build.source_digest()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))
    build.source_digest.cache_clear()
    assert len({before, after, build.source_digest()}) == 3


def test_levels_are_chosen_by_what_the_processor_shows(monkeypatch):
    v4 = "avx2 fma f16c bmi1 bmi2 movbe abm avx512f avx512bw avx512cd avx512dq avx512vl"
    monkeypatch.setattr(levels.platform, "machine", lambda: "x86_64")
    for flags, best in [(v4 + " avx512_bf16 avx512_vnni", "avx512bf16"), (v4, "avx512"), ("sse2", "generic")]:
        monkeypatch.setattr(levels, "_processor_flags", lambda flags=flags: set(flags.split()))
        assert levels.usable()[0].name == best
    monkeypatch.setattr(levels.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(levels, "_processor_flags", lambda: set(v4.split()))
    assert [level.name for level in levels.usable()] == ["generic"]


def test_threads_are_the_physical_cores_within_mask_and_quota(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "_siblings", lambda cpu: f"{cpu % 2}")
    monkeypatch.setattr(threads, "_quota", lambda: float("inf"))
    assert threads.physical_cores() == 2
    monkeypatch.setattr(threads, "_quota", lambda: 1.5)
    assert threads.physical_cores() == 1
    monkeypatch.setattr(threads, "_quota", lambda: 0.25)
    assert threads.physical_cores() == 1
