"""Everything that a GPU is wanted for, in one call of at most eight minutes: time on one is rare.

    python -m benchmarks.gpu_session --out FOLDER            # all stages; the table last, JSON in FOLDER
    python -m benchmarks.gpu_session --out FOLDER --stages correctness,bounds
    python -m benchmarks.gpu_session --out FOLDER --dry      # all of it, small, on a CPU

Stages: the machine's ceilings, compiling, correctness against float64, kernels beside their bounds, the engine on
random weights, transformers' continuous batching on the same prompts. Each has a process of its own, and a deadline.
What is needed is this checkout, Python 3.12, torch, triton, msgspec and safetensors; the last two may lie in a folder:

    pip install --target .gpu-packages --python-version 3.12 --only-binary=:all: msgspec safetensors
"""

import argparse
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from benchmarks.gpu.report import Stage, as_json, table  # noqa: E402
from benchmarks.gpu.session import PLANS, WHOLE, command_of, failures, perform, run_apart, run_here  # noqa: E402
from benchmarks.sections import chosen  # noqa: E402

DRY_SECONDS = 60.0  # for a stage; none should need a tenth


def facts(*, dry: bool) -> dict[str, str]:
    """Where and with what this was measured; found without starting CUDA in this process."""
    packages = ("torch", "triton", "transformers", "msgspec", "safetensors")
    found = {name: _version(name) for name in packages}
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit",
        "--format=csv,noheader",
    ]
    gpu = "none: a dry run on a CPU" if dry else _output(query) or "nvidia-smi says nothing"
    return {
        "commit": _output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]) or "not a git checkout",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "gpu": gpu,
        "python": platform.python_version(),
        **found,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def run_all(names: list[str], folder: Path, *, dry: bool, whole: float) -> list[Stage]:
    """One stage after the other, each with its own seconds as long as the whole has so many left."""
    end, stages = time.monotonic() + whole, list[Stage]()
    for name in names:
        path, seconds = folder / f"{name}.jsonl", min(PLANS[name].seconds, end - time.monotonic())
        path.unlink(missing_ok=True)
        if dry:
            stage = run_here(name, path, dry=True, seconds=DRY_SECONDS, ceilings=folder / "ceilings.jsonl")
        elif seconds < 5:
            stage = Stage(name=name, ended="out of time", seconds=0.0, lines=[])
        else:
            stage = run_apart(name, command_of(name, folder, seconds), path, seconds)
        stages.append(stage)
        print(f"{name}: {stage.ended}, {stage.seconds:.0f} s, {len(stage.lines)} lines", file=sys.stderr, flush=True)
    return stages


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_session", description="One session on a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for results, made where it is missing")
    parser.add_argument("--stages", type=chosen(dict.fromkeys(PLANS, "")), default=list(PLANS), help=",".join(PLANS))
    parser.add_argument("--dry", action="store_true", help="everything small, on a CPU")
    parser.add_argument("--whole", type=float, default=WHOLE, help="seconds for all stages together")
    parser.add_argument("--only", choices=PLANS, help=argparse.SUPPRESS)  # how a stage's own process is started
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        path, ceilings = folder / f"{options.only}.jsonl", folder / "ceilings.jsonl"
        perform(PLANS[options.only], path, dry=options.dry, until=options.until, ceilings=ceilings)
        return 0
    where = facts(dry=options.dry)
    stages = run_all(options.stages, folder, dry=options.dry, whole=options.whole)
    shown = table(where, stages)
    (folder / "table.txt").write_text(shown + "\n")
    (folder / "results.json").write_text(as_json(where, stages) + "\n")
    print(shown)
    broken = failures(stages)
    print(f"\n{len(broken)} failures" + "".join(f"\n  {line.text()}" for line in broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
