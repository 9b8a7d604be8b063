"""Compile the kernels ahead: `python -m kernels.cpu.compile [--levels avx2,avx512] [--output FOLDER]`."""

import argparse
import sys
from pathlib import Path

from kernels.cpu.build import BuildError, compile_level
from kernels.cpu.cache import BUILT
from kernels.cpu.levels import BY_NAME, of_this_machine, usable


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every level was built, 1 when one was not."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.compile", description="Compile the CPU kernels ahead.")
    names = ",".join(BY_NAME)
    parser.add_argument(
        "--levels", default=usable()[0].name, help=f"of {names}, or all; default: this processor's best"
    )
    parser.add_argument("--output", type=Path, default=BUILT, help="folder; default: where the package looks first")
    options = parser.parse_args(arguments)
    every = ",".join(level.name for level in of_this_machine())
    for name in (every if options.levels == "all" else options.levels).split(","):
        if name not in BY_NAME:
            parser.error(f"--levels: all, or any of {names}, expected, got {name!r}")
        try:
            print(compile_level(BY_NAME[name], options.output))
        except BuildError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
