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

from kernels.cpu.cache import SCRATCH
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
    "--param=max-combine-insns=2",  # GCC would try three and four: a fifth of attention's time, for no speed
    "-fPIC",
    "-shared",
    "-pipe",  # no file of a compiler that was ended stays in the folder for temporary ones
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
DTYPES = ("bfloat16", "float32")
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


def build_name(level: Level, dtype: str | None = None) -> str:
    """What a library says that it is. `dtype`: the one that it multiplies and attends in; None: each of DTYPES."""
    return "-".join(filter(None, [level.name, dtype, source_digest()]))


def file_name(level: Level, dtype: str | None = None) -> str:
    return f"gllm-cpu-{build_name(level, dtype)}.so"


def file_names(level: Level, dtype: str | None) -> list[str]:
    """Of the libraries that serve a dtype, in the order to look."""
    return [file_name(level), *([] if dtype is None else [file_name(level, dtype)])]


def compiler() -> str:
    """The C++ compiler: $CXX or the first that is found. Raises BuildError."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler: none of $CXX, c++, g++ and clang++ is installed")


def compile_level(level: Level, folder: Path, extra: tuple[str, ...] = (), dtype: str | None = None) -> Path:
    """Build a level into `folder`, unless it is there, and return the file. Raises BuildError.

    `dtype`: the only one that is needed, which takes half the time. Of several processes that ask at once, one builds
    and the others wait for it.
    """
    target = folder / file_name(level, dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f".{target.name}.lock"):
            if not target.exists():
                _build(level, dtype, target, extra)
    except OSError as error:
        raise BuildError(f"{folder}: cannot be written: {error}") from None
    return target


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(level: Level, dtype: str | None, target: Path, extra: tuple[str, ...]) -> None:
    """Compile the sources side by side, link them, and put the result in place at once: no reader sees half of it."""
    with (
        tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent) as scratch,
        ThreadPoolExecutor(physical_cores()) as pool,  # the longest come first: more at once would hold them up
    ):
        macros = [f'-DGLLM_BUILD="{build_name(level, dtype)}"', *([f"-DGLLM_ONLY_{dtype.upper()}"] if dtype else [])]
        command = [compiler(), *FLAGS, *level.flags, *extra]
        sources = _sources(dtype, Path(scratch))
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        pairs = zip(sources, objects, strict=True)
        list(pool.map(lambda pair: _run([*command, *macros, "-c", str(pair[0]), "-o", pair[1]]), pairs))
        built = Path(scratch) / target.name
        _run([*command, "-shared", *objects, "-o", str(built)])
        os.replace(built, target)


def _sources(dtype: str | None, scratch: Path) -> list[Path]:
    """What to compile: each file that is for a dtype which is asked for, by its name's end, and all others as one.

    Of these the compiler would spend more than a third of its time on headers, once for each.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    wanted = [
        path for path in sources if path.stem.endswith(tuple(f"_{one}" for one in DTYPES if dtype in (None, one)))
    ]
    common = [path for path in sources if not path.stem.endswith(tuple(f"_{one}" for one in DTYPES))]
    together = scratch / "together.cpp"
    together.write_text("".join(f'#include "{path}"\n' for path in common))
    return [*wanted, together]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} did not end within {COMPILE_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {lines[0] if lines else 'no message'}")
