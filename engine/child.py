"""The engine's own process: `python -m engine.child FD`. Commands come in on a socket, reports go out.

It dies with its parent: by the kernel's parent-death signal where there is one, and on end of file anywhere.
"""

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from typing import TYPE_CHECKING

from engine.request import Delta, FinishReason, Request
from engine.wire import (
    HEADER_BYTES,
    Add,
    Begin,
    Cancel,
    ClearCache,
    Command,
    Compiling,
    Failed,
    Hold,
    Launching,
    Loading,
    Ready,
    Report,
    Stepped,
    Stop,
    Unhold,
    command_decoder,
    encode_frame,
)

if TYPE_CHECKING:
    from engine.engine import Engine

IDLE_SECONDS = 1.0  # how often an idle engine sends a snapshot of its counters
PR_SET_PDEATHSIG = 1


class ParentGoneError(Exception):
    """The parent's end of the socket is closed."""


class Channel:
    """Frames over a socket: commands in, reports out."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def send(self, report: Report) -> None:
        try:
            self._socket.sendall(encode_frame(report))
        except OSError:
            raise ParentGoneError from None

    def receive(self, timeout: float) -> list[Command]:
        """The commands that are there, waiting at most `timeout` seconds for the first. Raises ParentGoneError."""
        while self._selector.select(timeout):
            chunk = self._socket.recv(1 << 20)
            if not chunk:
                raise ParentGoneError
            self._buffer += chunk
            timeout = 0.0
        return self._split()

    def _split(self) -> list[Command]:
        commands: list[Command] = []
        while len(self._buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self._buffer[:HEADER_BYTES], "big")
            if len(self._buffer) < end:
                break
            commands.append(command_decoder.decode(self._buffer[HEADER_BYTES:end]))
            del self._buffer[:end]
        return commands


class Child:
    """Serves one engine over a channel until it is told to stop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stopping = False
        self._refused: list[Delta] = []
        self._launching: list[str] = []
        self._engine = self._load()

    def _load(self) -> "Engine":
        started = time.monotonic()
        from engine.engine import Engine  # torch is imported here, so that its seconds are seen as a phase

        self._channel.send(Loading("import", time.monotonic() - started))
        begin = self._first_command()
        started = time.monotonic()
        engine = Engine(begin.config, on_launch=self._announce, on_compile=self._compiling)
        self._channel.send(Loading("model", time.monotonic() - started))
        gc.collect()
        gc.freeze()  # what was loaded lives as long as the process: no collection needs to look at it again
        self._channel.send(Ready(engine.info))
        return engine

    def _first_command(self) -> Begin:
        while True:
            for command in self._channel.receive(IDLE_SECONDS):
                assert isinstance(command, Begin), f"the first frame must be Begin, got {command!r}"
                return command

    def serve(self) -> None:
        idle = True
        while not self._stopping:
            self._obey(self._channel.receive(IDLE_SECONDS if idle else 0.0))
            was_idle, idle = idle, not self._step()
            if idle and not was_idle:
                self._announce([])
                self._check()

    def _step(self) -> bool:
        """One step and its report; False if there was nothing to do."""
        engine = self._engine
        launched = engine.launch_ahead()
        self._obey(self._channel.receive(0.0))  # a cancel that came while the device worked takes effect at once
        deltas = self._refused + engine.collect()
        self._refused = []
        if engine.failure is not None:
            raise engine.failure
        self._channel.send(Stepped(deltas, engine.stats()))
        return launched or bool(deltas)

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Add(request):
                    self._add(request)
                case Cancel(request_id):
                    self._engine.cancel(request_id)
                case Hold(request_id):
                    self._engine.hold(request_id)
                case Unhold(request_id):
                    self._engine.unhold(request_id)
                case ClearCache():
                    self._engine.clear_cache()
                case Stop():
                    self._stopping = True
                case Begin():
                    raise AssertionError("Begin may come only once")

    def _add(self, request: Request) -> None:
        from engine.validate import TooLargeError

        try:
            self._engine.add(request)
        except ValueError as error:
            refusal = "too_large" if isinstance(error, TooLargeError) else "invalid"
            reason = FinishReason.ERROR
            self._refused.append(Delta(id=request.id, finish_reason=reason, error=str(error), refusal=refusal))

    def _announce(self, ids: list[str]) -> None:
        if ids != self._launching:
            self._launching = ids
            self._channel.send(Launching(ids))

    def _compiling(self, what: str) -> None:
        self._channel.send(Compiling(what))

    def _check(self) -> None:
        """The books, looked at once the last request has ended; a running worker only reports."""
        try:
            self._engine.check()
        except AssertionError as error:
            warnings.warn(f"the block pool's books are wrong: {error}", stacklevel=1)

    @property
    def launching(self) -> list[str]:
        return self._launching


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends, whatever this process is doing then (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(descriptor: int) -> int:
    """Serve on an inherited socket. Exit status 0 after Stop, 1 after a failure (reported first), 2 if refused."""
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal's are for the parent, which drains
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        return _serve(channel)
    except ParentGoneError:
        os._exit(1)  # nobody is left to tell; the interpreter's own way out takes a loaded torch a second


def _serve(channel: Channel) -> int:
    try:
        child = Child(channel)
    except (ValueError, ImportError, MemoryError) as error:
        channel.send(Failed(f"{type(error).__name__}: {error}" if not str(error) else str(error), [], refused=True))
        return 2
    try:
        child.serve()
    except ParentGoneError:
        raise
    except Exception as error:  # a failed step: the parent hands the jobs back, the process ends
        channel.send(Failed(f"{type(error).__name__}: {error}", child.launching))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
