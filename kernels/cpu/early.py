"""Begin to compile while a worker still imports what it needs: `python -m kernels.cpu.early [DTYPE]`.

It makes what `library.load` would make later; who asks meanwhile waits for it there, at the lock of the build. It says
nothing: where it fails, `load` fails in the same way, and tells. It ends, with the compilers that it has started, when
its standard input does: whoever asked for it holds the other end. It must lead a process group of its own.
"""

import os
import signal
import sys
import threading

from kernels.cpu import cache
from kernels.cpu.build import BuildError, compile_level, file_names
from kernels.cpu.levels import usable


def main(dtype: str | None = None) -> int:
    """Exit status 0 when there is nothing left to compile, 1 when that failed or has no folder to be kept in."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_input, daemon=True).start()
    level, folders = usable()[0], [*cache.folders()]
    if any((folder / name).exists() for folder in folders for name in file_names(level, dtype)):
        return 0
    if folders[-1] == cache.BUILT:
        return 1
    try:
        compile_level(level, folders[-1], dtype=dtype)
    except BuildError:
        return 1
    cache.remove_old(folders[-1])
    return 0


def _end_with_input() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock the interpreter would wait for when it ends
        pass
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
