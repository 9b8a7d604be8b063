"""A compiler that waits: what happens while it runs, without the time of a real one."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

# A compiler that notes what it is asked for, waits at a gate, and makes libraries that know their name only.
COMPILER = """#!{python} -IS
import os, subprocess, sys, time
work, real, arguments = {work!r}, {real!r}, sys.argv[1:]
with open(work + "/log", "a") as log:
    print(os.getpid(), *arguments, file=log)
end = time.monotonic() + 60
while not os.path.exists(work + "/gate"):
    if time.monotonic() > end:
        sys.exit("the gate stays shut")
    time.sleep(0.005)
if "-c" in arguments:
    built = [word for word in arguments if word.startswith("-DGLLM_BUILD=")]
    text = 'extern "C" const char* gllm_build() {{ return GLLM_BUILD; }}' * ("together.cpp" in " ".join(arguments))
    arguments = ["-fPIC", *built, "-c", "-x", "c++", "-", "-o", arguments[-1]]
    sys.exit(subprocess.run([real, *arguments], input=text.encode()).returncode)
os.execv(real, [real, *arguments])
"""


class Slow:
    """The compiler, its calls, and its gate."""

    def __init__(self, work: Path, real: str) -> None:
        self.work, self.path = work, work / "slow-cxx"
        self.path.write_text(COMPILER.format(python=sys.executable, work=str(work), real=real))
        self.path.chmod(0o755)

    def open(self) -> None:
        (self.work / "gate").touch()

    @property
    def calls(self) -> list[list[str]]:
        log = self.work / "log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def running(self) -> list[int]:
        return [pid for pid in (int(call[0]) for call in self.calls) if is_alive(pid)]


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)
