"""Running stages: each in a process of its own, with a deadline, so that none can take the others' results along."""

import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.gpu import ROOT
from benchmarks.gpu.ceilings import COPY, PRODUCT
from benchmarks.gpu.machine import BANDWIDTH, FLOPS, Machine
from benchmarks.gpu.report import Line, Stage, read_lines

GRACE = 3.0  # seconds that a stage is given beyond its deadline, which it knows, before it is killed


class Plan(Struct, frozen=True):
    """A stage: the module whose `stage(machine)` it is, and the seconds it may take, its own start included."""

    module: str
    seconds: float


PLANS = {
    "ceilings": Plan("benchmarks.gpu.ceilings", 25),
    "compile": Plan("benchmarks.gpu.compiling", 50),
    "correctness": Plan("benchmarks.gpu.correctness", 60),
    "bounds": Plan("benchmarks.gpu.bounds", 110),
    "engine": Plan("benchmarks.gpu.end_to_end", 140),
    "peers": Plan("benchmarks.gpu.peers", 90),
}
WHOLE = 475.0  # seconds for everything


def perform(plan: Plan, path: Path, *, dry: bool, until: float, ceilings: Path) -> None:
    """One stage in this process, until a time of time.monotonic(); each line is written as soon as it is known."""
    bandwidth, flops = measured_ceilings(ceilings)
    machine = Machine(dry=dry, deadline=until, bandwidth=bandwidth, flops=flops)
    stage = importlib.import_module(plan.module).stage
    with path.open("wb", buffering=0) as file:
        for line in stage(machine):
            file.write(msgspec.json.encode(line) + b"\n")


def measured_ceilings(path: Path) -> tuple[float, float]:
    """Bytes/s and FLOP/s as this run measured them, or those of an H200 where it has not."""
    found = {line.name: line.value for line in read_lines(path) if line.value}
    return found.get(COPY, BANDWIDTH / 1e12) * 1e12, found.get(PRODUCT, FLOPS / 1e12) * 1e12


def run_apart(name: str, command: Sequence[str], path: Path, seconds: float) -> Stage:
    """A stage in a process of its own. Whatever becomes of it, what it wrote so far is kept."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=max(1.0, seconds + GRACE)
        )
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        ended = "done" if done.returncode == 0 else f"failed with {done.returncode}: {last[0][:300]}"
    except subprocess.TimeoutExpired:
        ended = f"stopped after {seconds + GRACE:.0f} s"
    return Stage(name=name, ended=ended, seconds=time.monotonic() - began, lines=read_lines(path))


def run_here(name: str, path: Path, *, dry: bool, seconds: float, ceilings: Path) -> Stage:
    """The same in this process: quick to start, but a hanging stage hangs all."""
    began, ended = time.monotonic(), "done"
    try:
        perform(PLANS[name], path, dry=dry, until=began + seconds, ceilings=ceilings)
    except Exception as error:  # one failure never loses the rest
        ended = f"failed: {type(error).__name__}: {error}"[:300]
    return Stage(name=name, ended=ended, seconds=time.monotonic() - began, lines=read_lines(path))


def command_of(name: str, folder: Path, seconds: float) -> list[str]:
    """All processes of a machine have the same time.monotonic(), so that a stage's own start counts."""
    options = {"--only": name, "--out": str(folder), "--until": f"{time.monotonic() + seconds}"}
    return [sys.executable, "-m", "benchmarks.gpu_session", *(word for pair in options.items() for word in pair)]


def failures(stages: Sequence[Stage]) -> list[Line]:
    """Checks that failed, and stages that did not end well."""
    broken = [Line(name=stage.name, ok=False, said=stage.ended) for stage in stages if stage.ended != "done"]
    return [*broken, *(line for stage in stages for line in stage.lines if line.ok is False)]
