"""The demo's worker: `gllm worker` as a child process, watched through its log."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from worker import logs

READY_SECONDS = 600.0  # reading a large model from a slow disk takes minutes
STOP_SECONDS = 40.0  # the worker's own grace time is 30
POLL_SECONDS = 0.05
SIGN_OF_LIFE_SECONDS = 5.0
PHRASES = {  # what people are shown of the worker's log, by event
    logs.MODEL_LOADING: "  tokenizer loaded; the engine reads the weights",
    logs.ENGINE_LOADING: "  engine: {phase} took {seconds:.1f} s",
    logs.ENGINE_READY: "  engine: {kv_blocks} KV blocks, {dtype} on {device}",
    logs.REDIS_WAITING: "  waiting for Redis",
}


class DemoFailed(RuntimeError):
    """The demo cannot go on; the message says why."""


def worker_command(model: str, device: str, dtype: str, queue: str) -> list[str]:
    options = ["--model", model, "--device", device, "--dtype", dtype, "--queue", queue, "--prefix-cache"]
    own = ["--metrics-port", "0", "--metrics-host", "127.0.0.1", "--log-format", "json", "--log-level", "info"]
    return [sys.executable, "-m", "worker", "worker", *options, *own]


class DemoWorker:
    """One worker process. Use it as a context manager: it is asked to stop (SIGTERM) at the end of the block.

    `status` is its exit status afterwards.
    """

    def __init__(self, model: str, device: str, dtype: str, redis: str, queue: str, log_path: Path) -> None:
        self._command = worker_command(model, device, dtype, queue)
        self._environment = {**os.environ, "GLLM_REDIS": redis}  # not an argument: it may hold a password
        self._log = _LogFile(log_path)
        self._process: subprocess.Popen[bytes] | None = None
        self.status: int | None = None

    def __enter__(self) -> Self:
        with self._log.path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demo, which then stops the worker
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.status = self._stop(STOP_SECONDS if error is None else STOP_SECONDS / 8)

    def _stop(self, patience: float) -> int:
        process = self._started
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the worker runs inside of its `with` block only"
        return self._process

    async def ready(self, show: Callable[[str], object]) -> None:
        """Waits until the worker claims jobs, showing what it does. Raises DemoFailed when it ends or never does."""
        started, shown = time.monotonic(), 0.0
        while (waited := time.monotonic() - started) < READY_SECONDS:
            running = self._started.poll() is None
            for line in self._log.new_lines():
                if line["event"] == logs.READY:
                    return
                if phrase := PHRASES.get(line["event"]):
                    show(phrase.format_map(line))
            if not running:
                raise DemoFailed(f"the worker ended with status {self._started.returncode}: {self.last_words()}")
            if waited - shown >= SIGN_OF_LIFE_SECONDS:
                shown = waited
                show(f"  … {waited:.0f} s")
            await asyncio.sleep(POLL_SECONDS)
        raise DemoFailed(f"the worker was not ready within {READY_SECONDS:g} seconds: {self.last_words()}")

    async def ended(self) -> int:
        """The worker's exit status, once it has ended by itself."""
        while (status := self._started.poll()) is None:  # noqa: ASYNC110 (a process sets no event)
            await asyncio.sleep(POLL_SECONDS)
        return status

    def last_words(self) -> str:
        """The last error that the worker logged, else its last line."""
        return self._log.last_words()


class _LogFile:
    """A JSON log that is being written: its new lines, and what it said last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines that were completed since the last call."""
        with self.path.open("rb") as log:
            log.seek(self._read)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return list(_parsed(whole))

    def last_words(self) -> str:
        data = self.path.read_bytes()
        for line in reversed(list(_parsed(data))):
            if line.get("level") in ("error", "critical"):
                return str(line.get("message") or line.get("error") or line.get("reason") or line["event"])
        return data.decode(errors="replace").strip().rpartition("\n")[2] or "it said nothing"


def _parsed(data: bytes) -> Iterator[dict[str, Any]]:
    for raw in data.splitlines():
        try:
            line = json.loads(raw)
        except ValueError:
            continue  # what came before the worker's logs were set up, a usage error for one, is no JSON
        if isinstance(line, dict) and "event" in line:
            yield line
