"""A real `gllm worker`, started as people start it, and what it says on stderr."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("gllm"))
START_SECONDS = 90.0  # loading torch alone takes seconds, and other tests may be running


class WorkerProcess:
    """One worker. `wrap` are words to put before the command; the worker then is that command's child.

    `command`: what to run instead of the installed `gllm`.
    """

    def __init__(
        self,
        log: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
        command: Sequence[str] = (COMMAND,),
    ) -> None:
        self._log = log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GLLM_")}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*wrap, *command, "worker", *flags],
                stderr=stderr,
                stdout=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
                env=inherited if environment is None else dict(environment),
            )

    @property
    def events(self) -> list[dict[str, Any]]:
        """Every line so far; each must be JSON, from the first one on."""
        return [json.loads(line) for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_event(self, event: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        """The first line with this event. Fails at once when the worker has ended without it."""
        end = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            found = [line for line in self.events if line["event"] == event]
            if found:
                return found[0]
            assert not ended, f"the worker ended with {self.process.returncode} before {event}:\n{self.said}"
            assert time.monotonic() < end, f"no {event} in {seconds} s:\n{self.said}"
            time.sleep(0.02)

    def wait_exit(self, seconds: float = START_SECONDS) -> int:
        return self.process.wait(seconds)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a page of the health port."""
        line = self.wait_event("metrics_listening")
        try:
            with urllib.request.urlopen(f"http://{line['host']}:{line['port']}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def descendants(self) -> list[int]:
        """Process ids of the worker's children (its engine) and theirs."""
        found, waiting = [], [self.process.pid]
        while waiting:
            children = _children(waiting.pop())
            found += children
            waiting += children
        return found

    def end(self) -> None:
        """Kill it, however it is; what it started dies with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(word) for task in tasks.glob("*/children") for word in task.read_text().split()]
