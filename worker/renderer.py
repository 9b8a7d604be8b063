"""Rendering chat templates outside of this process, where the kernel bounds their time and their memory.

A template is foreign code. In a thread nothing could stop it, and one long operation inside Python's global lock
(comparing two nested lists can take for ever) would hold up every stream of this worker.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from datetime import datetime
from pathlib import Path
from typing import Any

from worker.chat_child import FAILED, HEADER_BYTES, Request
from worker.sandbox import TemplateFailed

ROOT = str(Path(__file__).resolve().parent.parent)  # where our packages are, also when they are not installed
MAX_SECONDS = 5.0  # of processor time: rendering a body of 4 MiB takes well under one
MAX_MEMORY_MIB = 512  # some ten times what the largest body takes
PATIENCE_SECONDS = 60.0  # for a process that gets no processor time: a template out of its own ends long before


class Renderer:
    """Renders in processes that it starts, keeps, and replaces when a template made them end.

    As many as threads that call `render` at the same time. They end with this object, and with this process.
    `seconds` of processor time and `memory_mib` are what one rendering may take.
    """

    def __init__(self, seconds: float = MAX_SECONDS, memory_mib: int = MAX_MEMORY_MIB) -> None:
        self._limits = seconds, memory_mib
        self._idle: list[_Child] = []
        self._open = True
        weakref.finalize(self, _end, self._idle)

    def start(self) -> None:
        """Start a process that the first rendering will find ready. Returns at once."""
        self._idle.append(_Child(*self._limits))

    def render(self, source: str, variables: dict[str, Any], now: datetime) -> str:
        """What a template writes. Raises TemplateFailed."""
        request: Request = (source, variables, now)
        child = self._take()
        try:
            kind, text = child.ask(pickle.dumps(request))
        except (OSError, EOFError) as error:
            raise TemplateFailed(child.reason()) from error
        finally:
            self._give_back(child)
        if kind == FAILED:
            raise TemplateFailed(text)
        return text

    def close(self) -> None:
        """End the processes; one that still renders ends with its answer."""
        self._open = False
        _end(self._idle)

    def _take(self) -> "_Child":
        while self._idle:
            child = self._idle.pop()
            if child.ready():
                return child
            child.end()
        return _Child(*self._limits)

    def _give_back(self, child: "_Child") -> None:
        if self._open and child.ready():
            self._idle.append(child)
        else:
            child.end()


class _Child:
    """One process. After an error it is of no more use."""

    def __init__(self, seconds: float, memory_mib: int) -> None:
        self._seconds = seconds
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(PATIENCE_SECONDS)
        self._answers = self._socket.makefile("rb")
        self._waiting = False
        path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        # -P: never import from the current directory
        command = [sys.executable, "-P", "-m", "worker.chat_child", str(seconds), str(memory_mib)]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )

    def ready(self) -> bool:
        """Whether it can take a request."""
        return not self._waiting and self._process.poll() is None

    def ask(self, request: bytes) -> tuple[bytes, str]:
        """The kind of the answer and its text. Raises OSError or EOFError when none comes."""
        self._waiting = True
        self._socket.sendall(len(request).to_bytes(HEADER_BYTES, "big") + request)
        header = self._answers.read(HEADER_BYTES)
        answer = self._answers.read(int.from_bytes(header, "big"))
        if not answer:
            raise EOFError
        self._waiting = False
        return answer[:1], answer[1:].decode("utf-8", "surrogatepass")

    def reason(self) -> str:
        """Why there was no answer."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"was not done after {PATIENCE_SECONDS:g} seconds"
        if status == -signal.SIGPROF:
            return f"took more than {self._seconds:g} seconds"
        return f"ended the process that rendered it, with status {status}"

    def end(self) -> None:
        self._answers.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _end(children: list[_Child]) -> None:
    while children:
        children.pop().end()
