"""The parent's end of the pipe: one engine, started in its own virtual environment, and asked for runs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("GLLM_PEERS", ROOT / ".peers"))  # made by `make peers`


class PeerError(RuntimeError):
    """The engine's process ended; the text has the last lines that it wrote."""


class Run(Struct, frozen=True):
    """Seconds since the run began, and tokens; a place for each job."""

    first: list[float]
    total: float
    produced: list[int]


class Peer(Struct, frozen=True, kw_only=True):
    """How to start an engine: the module that serves it, the environment that has it, options."""

    name: str
    module: str
    environment: str | None  # a directory under PEERS; None: ours
    options: dict[str, Any]

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.environment is None else PEERS / self.environment / "bin" / "python"

    @property
    def installed(self) -> bool:
        return self.python.exists()


class PeerProcess:
    """Use it as a context manager. `start_seconds`: from the start of the process to its first token."""

    def __init__(self, peer: Peer) -> None:
        self._log = Path(f"/tmp/gllm-peer-{os.getpid()}.log")
        command = [str(peer.python), "-m", peer.module, json.dumps(peer.options)]
        began = time.time()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            hello = self._read()
        except PeerError:
            self.__exit__()
            raise
        self.version: str = hello["version"]
        self.start_seconds: float = hello["ready_at"] - began

    def run(self, prompts: list[list[int]], tokens: int) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        assert answer["produced"] == [tokens] * len(prompts), answer["produced"]
        return Run(answer["first"], answer["total"], answer["produced"])

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process had resident so far (Linux)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"status {self._process.wait()}: {' | '.join(self._log.read_text().splitlines()[-6:])}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.unlink(missing_ok=True)
