"""The only door between asyncio and the engine: starts its process, sends it commands, hands on what it reports."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import structlog

from engine.config import EngineConfig
from engine.request import Delta, Request, Stats
from engine.wire import (
    HEADER_BYTES,
    Add,
    Begin,
    Cancel,
    ClearCache,
    Command,
    Compiling,
    EngineInfo,
    Failed,
    Hold,
    Launching,
    Loading,
    Ready,
    Report,
    Stepped,
    Stop,
    Unhold,
    encode_frame,
    report_decoder,
)
from worker import logs

ROOT = str(Path(__file__).resolve().parent.parent)  # where our packages are, also when they are not installed
# Threads that wait for the next product spin for some 20 us, then sleep: spinning longer turns a busy neighbour on one
# core into steps of ten times the length, not spinning doubles them on an idle one. And huge pages.
ENVIRONMENT = {"GOMP_SPINCOUNT": "2000", "THP_MEM_ALLOC_ENABLE": "1"}
CHILD = "engine.child"  # the module that is the engine's process; a benchmark puts a stand-in here
STOP_SECONDS = 5.0  # a step may still be running when the child is told to stop; as long when it was killed
POLL_SECONDS = 0.01  # how soon the end of a process is seen
OUTPUT_SECONDS = 1.0  # for the last lines of a process that has ended
_log = structlog.get_logger("gllm")


class EngineRefused(Exception):
    """The engine could not start, and would not next time: the model or the settings are at fault."""


class EngineDied(Exception):
    """The engine's process ended or failed. `in_flight` are the requests of the step that it was in."""

    def __init__(self, message: str, in_flight: list[str]) -> None:
        super().__init__(message)
        self.in_flight = in_flight


class Bridge:
    """A running engine process. All methods but `start`, `deltas` and `close` return at once."""

    info: EngineInfo

    def __init__(self) -> None:
        self.stats = Stats()
        self.stats_time = time.monotonic()
        self.last_step = time.monotonic()  # when the engine last showed progress
        self.compiling: str | None = None  # what it compiles or captures, which makes the step in flight a long one
        self.loading: list[Loading] = []
        self.busy = False  # requests were added that have not ended
        self._active: set[str] = set()
        self._launched: list[str] = []
        self._loaded = False
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        """The id of the engine's process, once there is one."""
        return None if self._process is None else self._process.pid

    async def spawn(self) -> None:
        """Start the process. It imports what it needs, and waits to be told what to load."""
        if self._process is None:
            await self._spawn()

    async def start(self, config: EngineConfig) -> None:
        """Start the process, unless it is, and wait until the model is loaded. Raises EngineRefused or EngineDied."""
        await self.spawn()
        self._send(Begin(config))
        while True:
            report = await self._receive()
            match report:
                case Loading():
                    self.loading.append(report)
                case Compiling():
                    self._note_compiling(report)
                case Ready(info):
                    self.info = info
                    self._loaded = True
                    self.compiling = None
                    self.last_step = time.monotonic()
                    return
                case _:
                    raise AssertionError(f"the engine reported {report!r} while loading")

    def add(self, request: Request) -> None:
        """Hand a request to the engine. Its id is free again once the last delta of the one before has come."""
        assert request.id not in self._active, f"{request.id} is in the engine already"
        if not self.busy:
            self.last_step = time.monotonic()
        self.busy = True
        self._active.add(request.id)
        self._send(Add(request))

    def cancel(self, request_id: str) -> None:
        """End a request; a last delta says so, as one always does."""
        self._send(Cancel(request_id))

    def hold(self, request_id: str) -> None:
        self._send(Hold(request_id))

    def unhold(self, request_id: str) -> None:
        self._send(Unhold(request_id))

    def clear_cache(self) -> None:
        self._send(ClearCache())

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """One list a step, for as long as the engine lives. Raises EngineDied."""
        while True:
            report = await self._receive()
            if isinstance(report, Launching):
                self._launched = report.ids
            elif isinstance(report, Compiling):
                self._note_compiling(report)
            elif isinstance(report, Stepped):
                self._note(report)
                if report.deltas:
                    yield report.deltas

    @property
    def in_flight(self) -> list[str]:
        """The requests of the step in flight; those that have ended since are not among them."""
        return [request_id for request_id in self._launched if request_id in self._active]

    def kill(self) -> None:
        """End the process at once, with its compilers; `deltas` then raises EngineDied, unless it waits in a driver."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Stop the process, if there is one; kill it if it is still loading or does not end by itself."""
        if self._process is None:
            return
        with suppress(OSError):
            self._send(Stop())
        if not self._loaded:  # it reads no commands before it is
            self.kill()
        if not await self._ends(self._process):
            self.kill()
            if not await self._ends(self._process):  # it waits in a device driver, perhaps for ever
                _log.error(logs.ENGINE_UNKILLABLE, pid=self._process.pid)
        if self._writer is not None:
            self._writer.close()
        _, late = await asyncio.wait(self._tasks, timeout=OUTPUT_SECONDS)
        for task in late:  # somebody else has its output open: a compiler that it had started
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self._process._transport.close()  # type: ignore[attr-defined]  # nothing public closes a pipe that is still open

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # never import from the current directory
                "-m",
                CHILD,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # compilers that it starts are of its group, and end with it
                env=ENVIRONMENT | os.environ | {"PYTHONPATH": path},
            )
        self._tasks.append(asyncio.create_task(self._relay_output(process)))
        self._reader, self._writer = await asyncio.open_connection(sock=ours)

    async def _relay_output(self, process: asyncio.subprocess.Process) -> None:
        """What the engine's process prints (warnings, a crash's traceback) goes into our log, line by line."""
        assert process.stdout is not None
        line = None
        while line != b"":
            try:
                line = await process.stdout.readline()
            except ValueError:  # beyond the reader's limit; it has dropped it, and would block the engine if we stopped
                line = b"(a line too long to show)"
            if text := line.decode(errors="replace").rstrip():
                _log.warning(logs.ENGINE_OUTPUT, line=text)

    def _send(self, command: Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(command))

    async def _status(self) -> int | None:
        """The exit status of a process that has hung up. One that stays for all that is killed."""
        assert self._process is not None
        if not await self._ends(self._process):
            self.kill()
            await self._ends(self._process)
        return self._process.returncode

    async def _ends(self, process: asyncio.subprocess.Process) -> bool:
        """Whether the process ends within the time it gets. (`wait` would wait for its output to be closed, too.)"""
        end = time.monotonic() + STOP_SECONDS
        while process.returncode is None and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        return process.returncode is not None

    async def _receive(self) -> Report:
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            body = await self._reader.readexactly(int.from_bytes(header, "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineDied(f"the engine's process ended with status {await self._status()}", self.in_flight) from None
        report = report_decoder.decode(body)
        if isinstance(report, Failed):
            if report.refused:
                raise EngineRefused(report.message)
            self._launched = report.in_flight
            raise EngineDied(report.message, self.in_flight)
        return report

    def _note_compiling(self, report: Compiling) -> None:
        self.compiling = report.what
        self.last_step = time.monotonic()
        _log.info(logs.ENGINE_COMPILING, what=report.what)

    def _note(self, report: Stepped) -> None:
        self.stats, self.stats_time = report.stats, time.monotonic()
        self.last_step, self.compiling = self.stats_time, None
        for delta in report.deltas:
            if delta.finish_reason is not None:
                self._active.discard(delta.id)
        self.busy = bool(self._active)
