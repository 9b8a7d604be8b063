"""Worker processes and the supervisor that starts another one in the place of each that ends."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos.diary import Diary
from tests.e2e.worker_process import WorkerProcess

ROOT = Path(__file__).resolve().parent.parent.parent
WATCH_SECONDS = 0.02
SETTLED_SHARE = 0.25
WAIT_SECONDS = 60.0
QUIET_EVENTS = ("engine_died",)  # what a worker may say at level error, when its engine was killed


class Member:
    """One worker of the crew. `may_exit`: with what status it may end by now; any other end is a fault."""

    def __init__(self, name: str, process: WorkerProcess, may_exit: Set[int]) -> None:
        self.name = name
        self.process = process
        self.may_exit = set(may_exit)
        self.frozen = False
        self.ended: float | None = None  # when (monotonic) the supervisor saw its end
        self._started = time.monotonic()
        self._ready: float | None = None  # since when (monotonic)

    @property
    def pid(self) -> int:
        return self.process.process.pid

    @property
    def status(self) -> int | None:
        """None while it runs."""
        return self.process.process.poll()

    @property
    def ready(self) -> bool:
        """Whether it serves, or has served before it ended."""
        if self._ready is None and '"event":"ready"' in self.process.said:
            self._ready = time.monotonic()
        return self._ready is not None

    @property
    def settled(self) -> bool:
        """Whether it has served for a while, as measured by the time that this machine takes to start it."""
        if self._ready is None:
            return False
        return time.monotonic() - self._ready > SETTLED_SHARE * (self._ready - self._started)

    def signal(self, number: int, *allowed: int) -> None:
        self.may_exit |= set(allowed)
        self.process.process.send_signal(number)

    def signal_engine(self, number: int, *allowed: int) -> None:
        """To the engine's process, if there is one by now."""
        self.may_exit |= set(allowed)
        for pid in self.process.descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def complaints(self) -> list[str]:
        """Lines at level error or worse, but for those that were asked for."""
        lines = [line for line in self.process.events if line["level"] in ("error", "critical")]
        return [f"{self.name}: {line}" for line in lines if line["event"] not in QUIET_EVENTS]


class Crew:
    """`size` workers, always. Use it as a context manager: afterwards no process is left.

    `begin` starts a worker with its log at a path. `may_exit`: with what status workers may end from the beginning on.
    """

    def __init__(
        self,
        size: int,
        begin: Callable[[Path], WorkerProcess],
        directory: Path,
        diary: Diary,
        may_exit: Set[int] = frozenset(),
    ) -> None:
        self._begin = begin
        self._directory = directory
        self._diary = diary
        self._may_exit = may_exit
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self.everybody: list[Member] = []
        self.faults: list[str] = []
        self.members: list[Member] = []
        self.size = size
        self._serving: list[tuple[float, bool]] = []  # from when on (monotonic) somebody was ready, or nobody

    def __enter__(self) -> Self:
        self.members = [self._start() for _ in range(self.size)]
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_watching()
        for member in self.everybody:
            member.process.end()

    @property
    def ready(self) -> list[Member]:
        """Those that serve now."""
        return [member for member in self.members if member.status is None and member.ready and not member.frozen]

    @property
    def settled(self) -> list[Member]:
        """Those that have served for a while."""
        return [member for member in self.ready if member.settled]

    def wait_ready(self, count: int) -> None:
        """Until so many serve."""
        self._wait(lambda: self.ready, count)

    def wait_settled(self, count: int) -> list[Member]:
        """Until so many have served for a while."""
        return self._wait(lambda: self.settled, count)

    def _wait(self, members: Callable[[], list[Member]], count: int) -> list[Member]:
        end = time.monotonic() + WAIT_SECONDS
        while len(found := members()) < count:
            assert time.monotonic() < end, f"{len(found)} of {count} workers are there after {WAIT_SECONDS} s"
            time.sleep(WATCH_SECONDS)
        return found

    def served(self, begin: float, end: float) -> float:
        """Seconds between two moments (monotonic) in which at least one worker was ready."""
        changes = [*self._serving, (end, False)]
        spans = [(since, until) for (since, ready), (until, _) in itertools.pairwise(changes) if ready]
        return sum(max(0.0, min(until, end) - max(since, begin)) for since, until in spans)

    def drain(self, seconds: float = 15.0) -> None:
        """SIGTERM to all. Each has to end with status 0."""
        self._stop_watching()
        for member in self.members:
            member.signal(signal.SIGCONT)
            member.signal(signal.SIGTERM)
        end = time.monotonic() + seconds
        for member in self.members:
            status = member.process.wait_exit(max(0.1, end - time.monotonic()))
            if status != 0:
                self.faults.append(f"{member.name} ended with status {status} after SIGTERM")

    def complaints(self) -> list[str]:
        return self.faults + [line for member in self.everybody for line in member.complaints()]

    def tails(self, lines: int = 12, workers: int = 6) -> Iterator[str]:
        """The last lines of the latest logs."""
        for member in self.everybody[-workers:]:
            yield f"--- {member.name}, status {member.status}"
            yield from member.process.said.splitlines()[-lines:]

    def _start(self) -> Member:
        name = f"worker-{len(self.everybody)}"
        member = Member(name, self._begin(self._directory / f"{name}.log"), self._may_exit)
        self.everybody.append(member)
        self._diary.write(f"{name} started, pid {member.pid}")
        return member

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_SECONDS):
            for place, member in enumerate(self.members):
                if member.status is not None:
                    self._ended(member)
                    self.members[place] = self._start()
            if not self._serving or self._serving[-1][1] != bool(self.ready):
                self._serving.append((time.monotonic(), bool(self.ready)))

    def _ended(self, member: Member) -> None:
        member.ended = time.monotonic()
        self._diary.write(f"{member.name} ended with status {member.status}")
        if member.status not in member.may_exit:
            self.faults.append(f"{member.name} ended with status {member.status}, which nobody had asked for")

    def _stop_watching(self) -> None:
        self._stopping.set()
        self._watcher.join()


def starter(
    model: Path, url: str, queue: str, *flags: str, pace: float = 0.0, poison: str = ""
) -> Callable[[Path], WorkerProcess]:
    """How a crew starts its workers: as people do, or through `tests.chaos.paced_worker` with a pace or a poison."""
    place = ["--model", str(model), "--redis", url, "--queue", queue, "--metrics-port", "0"]
    paced = (sys.executable, "-m", "tests.chaos.paced_worker")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GLLM_")}
    paces = {"CHAOS_PACE": str(pace), "CHAOS_POISON": poison, "PYTHONPATH": str(ROOT)}

    def begin(log: Path) -> WorkerProcess:
        command = {"command": paced} if pace or poison else {}
        return WorkerProcess(log, *place, *flags, environment=inherited | paces, **command)

    return begin
