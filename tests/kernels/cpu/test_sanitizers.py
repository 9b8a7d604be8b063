"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on small shapes with buffers of the exact size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, levels

SCRIPT = Path(__file__).with_name("sanitized.py")
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-O0",
)  # optimised, it compiles for half a minute


def runtimes(compiler: str) -> str:
    """The sanitizers' libraries, to be loaded before all others."""
    paths = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip(f"{compiler} brings no sanitizers")
    return " ".join(paths)


def test_kernels_are_clean_under_address_and_undefined_behavior_sanitizers(a_compiler, tmp_path):
    environment = os.environ | {
        "LD_PRELOAD": runtimes(a_compiler),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "PYTHONMALLOC": "malloc",  # else small buffers share Python's pools, and what lies beside one is unguarded
    }
    library = build.compile_level(levels.usable()[0], tmp_path, SANITIZE)
    command = [sys.executable, "-P", str(SCRIPT), str(library)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr


@pytest.mark.slow
def test_threads_do_not_race_under_thread_sanitizer(a_compiler, tmp_path):
    program, sources = tmp_path / "stress", [SCRIPT.with_name("pool_stress.cpp"), build.SOURCES / "pool.cpp"]
    flags = ["-std=c++20", "-O1", "-g1", "-pthread", "-fsanitize=thread", f"-I{build.SOURCES}", "-o", str(program)]
    built = subprocess.run([a_compiler, *flags, *map(str, sources)], check=False, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"{a_compiler} cannot: {built.stderr[:200]}")
    done = subprocess.run([program], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
