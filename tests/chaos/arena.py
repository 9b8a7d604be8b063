"""A run: a server that keeps what it acknowledged, a crew of workers, clients, disturbances, and the verdict."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise, starmap
from pathlib import Path

import redis
from msgspec import Struct

from gllm.connection import connect_sync
from gllm.keys import GROUP, Keys
from tests.chaos.clients import Clients
from tests.chaos.crew import Crew, starter
from tests.chaos.diary import Diary
from tests.chaos.disturbances import Disturber
from tests.chaos.oracle import undisturbed
from tests.chaos.verdict import judge, judge_queue, judge_stream, report
from tests.chaos.witness import Witness
from tests.chaos.workload import Case, case
from tests.servers import Server, binaries

DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
SMALL = ("--max-sequences", "6", "--kv-blocks", "80")  # so few that jobs are preempted, and wait in Redis
FLAGS = ("--threads", "1", "--device", "cpu", "--grace", "0.5", *SMALL)
ENGINE = {"threads": 1, "device": "cpu", "prefix_cache": True, "max_sequences": 64, "kv_blocks": 2000}
LEASE_SECONDS = 1.0
CALM_SECONDS = 60.0  # for all jobs to end when nothing disturbs them any more
EVENTS = ("redis_lost", "self_fenced", "job_fenced", "job_redelivered", "job_resumed", "job_released", "job_repaired")
REAP_LEASES = 25  # for the consumers of killed workers to be reaped: ten, and the pause of a reaper


@contextmanager
def running(kind: str, directory: Path) -> Iterator[Server]:
    """A server that keeps what it has acknowledged, also when it is killed."""
    server = Server(binaries()[kind], directory, *DURABLE)
    server.start()
    try:
        yield server
    finally:
        server.stop(kill=True)


class Plan(Struct, frozen=True, kw_only=True):
    """How large a run is. `jobs`: at least so many. `pace`: seconds that each step sleeps; 0 is the plain `gllm`."""

    seed: int
    jobs: int
    workers: int
    tasks: int
    threads: int
    pace: float
    deck: tuple[str, ...]
    shards: int = 1


class Arena:
    """Everything of one run, wired. The server must be one of `running`."""

    def __init__(self, plan: Plan, server: Server, model: Path, directory: Path, queue: str) -> None:
        self._plan, self._server, self._model = plan, server, model
        self._keys = Keys(queue)
        self._diary = Diary()
        begin = starter(model, server.url, queue, *FLAGS, "--lease", str(LEASE_SECONDS), pace=plan.pace)
        self._crew = Crew(plan.workers, begin, directory, self._diary)
        self._disturber = Disturber(plan.seed, plan.deck, self._crew, server, LEASE_SECONDS, self._diary)
        self._clients = Clients(server.url, queue, self._next_case, self._diary)
        self._numbers = count()
        self._submitted = 0
        self._calm = False

    def run(self) -> str:
        """A summary of what happened. Raises AssertionError with a report where a promise was broken."""
        with connect_sync(self._server.url) as client:
            client.hset(self._keys.meta, "shards", self._plan.shards)
        with self._crew:
            try:
                return self._run()
            finally:
                self._clients.stop()

    def _run(self) -> str:
        faults, faulty = [], {}
        try:
            faults, faulty = self._disturb(), self._judge_jobs()
            faults += self._leave() + self._crew.complaints()
        except AssertionError as error:
            faults.append(f"the run broke off: {error}")
        broken = bool(faults or faulty)
        assert not broken, report(self._title(), faulty, faults, self._crew, self._diary)
        return self._title()

    def _disturb(self) -> list[str]:
        """All of the run but its end; what has no end then."""
        self._crew.wait_ready(1)
        self._clients.start(self._plan.tasks, self._plan.threads)
        self._disturber.play(self._lacks_jobs)
        self._calm = True
        self._diary.write("calm")
        unfinished = self._clients.join(CALM_SECONDS)
        self._diary.write("the clients are done")
        return [f"{job} has not ended" for job in unfinished]

    def _next_case(self) -> Case | None:
        if self._calm and not self._lacks_jobs():
            return None
        self._submitted = next(self._numbers) + 1
        return case(self._plan.seed, self._submitted - 1)

    def _lacks_jobs(self) -> bool:
        return self._submitted < self._plan.jobs

    def _judge_jobs(self) -> dict[Witness, list[str]]:
        witnesses = self._clients.witnesses
        with undisturbed(self._model, **ENGINE) as oracle, connect_sync(self._server.url) as client:
            expected = oracle.replies(witness.case for witness in witnesses)
            found = {
                witness: judge(witness, expected[witness.case.id], oracle) + judge_stream(client, self._keys, witness)
                for witness in witnesses
            }
        return {witness: faults for witness, faults in found.items() if faults}

    def _leave(self) -> list[str]:
        """What is left once the dead workers' consumers were reaped and the living workers were drained."""
        faults = self._wait_reaped()
        self._crew.wait_ready(self._plan.workers)
        self._crew.drain()
        with connect_sync(self._server.url) as client:
            return faults + judge_queue(client, self._keys, self._plan.shards)

    def _wait_reaped(self) -> list[str]:
        end = time.monotonic() + REAP_LEASES * LEASE_SECONDS
        with connect_sync(self._server.url) as client:
            while dead := self._dead_consumers(client):
                if time.monotonic() > end:
                    return [f"never reaped: {dead}"]
                time.sleep(0.1)
        return []

    def _dead_consumers(self, client: redis.Redis) -> list[str]:
        """Those that belong to no living worker: its pid is part of its name."""
        living = tuple(f"-{member.pid}-" for member in self._crew.members)
        streams = self._keys.streams(self._plan.shards)
        names = {item["name"].decode() for stream in streams for item in client.xinfo_consumers(stream, GROUP)}
        return sorted(name for name in names - {"-released"} if not any(pid in name for pid in living))

    def _silence(self, witness: Witness) -> float:
        """The longest time, with workers there, between two events of a reply that had begun."""
        return max(starmap(self._crew.served, pairwise(when for when, _ in witness.heard)), default=0.0)

    def _title(self) -> str:
        witnesses, done = self._clients.witnesses, Counter(self._disturber.done)
        counts = {
            "jobs": len(witnesses),
            "tokens": sum(len(witness.ids) for witness in witnesses),
            "resumes": sum(len(witness.resumes) for witness in witnesses),
            "hang-ups": sum(witness.hangups for witness in witnesses),
            "longest silence": f"{max(map(self._silence, witnesses), default=0.0):.1f} s",
            "workers": len(self._crew.everybody),
            "seconds": round(self._diary.seconds, 1),
        }
        events = Counter(line["event"] for member in self._crew.everybody for line in member.process.events)
        seen = {name: events[name] for name in EVENTS}
        plan = {name: getattr(self._plan, name) for name in ("seed", "workers", "pace", "shards")}
        return f"{plan}\n{self._server.binary.name}: {counts}\ndisturbances: {dict(done)}\nlogs: {seen}"
