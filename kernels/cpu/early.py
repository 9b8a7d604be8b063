"""Begin to compile while a worker still imports what it needs: `python -m kernels.cpu.early [DTYPE]`.

It makes what `library.load` would make later; who asks meanwhile waits for it there, at the lock of the build. It says
nothing: where it fails, `load` fails in the same way, and tells. It ends, with the compilers that it has started, when
its standard input does: whoever asked for it holds the other end. It must lead a process group of its own.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType

from kernels.cpu import cache
from kernels.cpu.build import BuildError, compile_level, file_names
from kernels.cpu.levels import usable

LEAVING_SECONDS, AGAIN_SECONDS = 2.0, 0.1  # for compilers to end by themselves; between the times that they are told


def main(dtype: str | None = None) -> int:
    """Exit status 0 when there is nothing left to compile, 1 when that failed or has no folder to be kept in."""
    signal.signal(signal.SIGTERM, _leave)
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
    for _ in range(round(LEAVING_SECONDS / AGAIN_SECONDS)):
        os.killpg(0, signal.SIGTERM)  # more than once: a process that is just becoming a compiler misses it
        time.sleep(AGAIN_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, lambda *_: None)  # the next ones are for compilers; ignored, they would be by these as well
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
