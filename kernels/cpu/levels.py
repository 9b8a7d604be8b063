"""Levels of instruction sets. One level is one build of the same sources, and one set of bits."""

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Level:
    """`flags` select it at the compiler; `needs` are names of /proc/cpuinfo that a processor must show."""

    name: str
    machines: tuple[str, ...]  # platform.machine(); empty: any
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()


_X86 = ("x86_64", "AMD64")
_AVX2 = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Best first. A level with AMX would stand before them all; it needs a machine that can run it.
LEVELS = (
    Level(
        "avx512bf16",
        _X86,
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        _AVX512 | {"avx512_bf16", "avx512_vnni"},
    ),
    Level("avx512", _X86, ("-march=x86-64-v4",), _AVX512),
    Level("avx2", _X86, ("-march=x86-64-v3",), _AVX2),
    Level("generic", ()),
)
BY_NAME = {level.name: level for level in LEVELS}


def of_this_machine() -> list[Level]:
    """The levels of this kind of machine, best first, whether or not this processor can run them. Never empty."""
    return [level for level in LEVELS if not level.machines or platform.machine() in level.machines]


def usable() -> list[Level]:
    """The levels that this processor can run, best first. Never empty."""
    shown = _processor_flags()
    return [level for level in of_this_machine() if level.needs <= shown]


def _processor_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
