"""From C++ sources to a shared object: one command, the same bits from every compiler.

The sources ask for each fused multiply-add by name and the compiler may not make others (-ffp-contract=off): so what a
level computes follows from the sources alone, and two builds of them agree.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path

from kernels.cpu.levels import Level
from kernels.cpu.threads import physical_cores

try:
    import fcntl
except ImportError:  # Windows: processes that start at once each build, and the last one's file stays
    fcntl = None

SOURCES = Path(__file__).with_name("src")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
COMPILE_SECONDS = 300  # a compiler that takes longer hangs


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which and why, in one line."""


@cache
def source_digest() -> str:
    """What the kernels compute with, as 16 hex digits of all sources and flags."""
    digest = blake2b(repr(FLAGS).encode(), digest_size=8)
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def file_name(level: Level) -> str:
    return f"gllm-cpu-{level.name}-{source_digest()}.so"


def compiler() -> str:
    """The C++ compiler: $CXX or the first that is found. Raises BuildError."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler: none of $CXX, c++, g++ and clang++ is installed")


def compile_level(level: Level, folder: Path, extra: tuple[str, ...] = ()) -> Path:
    """Build a level into `folder`, unless it is there, and return the file. Raises BuildError.

    Of several processes that ask at once, one builds and the others wait for it.
    """
    target = folder / file_name(level)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f".{target.name}.lock"):
            if not target.exists():
                _build(level, target, extra)
    except OSError as error:
        raise BuildError(f"{folder}: cannot be written: {error}") from None
    return target


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(level: Level, target: Path, extra: tuple[str, ...]) -> None:
    """Compile the sources side by side, link them, and put the result in place at once: no reader sees half of it."""
    with (
        tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch,
        ThreadPoolExecutor(physical_cores()) as pool,  # the longest come first: more at once would hold them up
    ):
        name = f'-DGLLM_BUILD="{level.name}-{source_digest()}"'
        command = [compiler(), *FLAGS, *level.flags, *extra]
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        pairs = zip(sources, objects, strict=True)
        list(pool.map(lambda pair: _run([*command, name, "-c", str(pair[0]), "-o", pair[1]]), pairs))
        built = Path(scratch) / target.name
        _run([*command, "-shared", *objects, "-o", str(built)])
        os.replace(built, target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} did not end within {COMPILE_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {lines[0] if lines else 'no message'}")
