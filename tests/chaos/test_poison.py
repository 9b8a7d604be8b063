"""A job that kills whoever steps it, among 64 that do not: it is the only dead letter, and the others soon go on.

"Soon" is counted from the end of the lease of the worker that died last before, and only while there is a worker that
could take the jobs: how long a supervisor needs to start one is not the queue's business.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gllm
from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.chaos.arena import ENGINE, running
from tests.chaos.clients import Clients
from tests.chaos.crew import Crew, starter
from tests.chaos.diary import Diary
from tests.chaos.oracle import undisturbed
from tests.chaos.verdict import judge, report
from tests.chaos.witness import Witness
from tests.chaos.workload import POISON, Case, case
from tests.servers import Server, first_kind

INNOCENTS = 64
WORKERS = 3
LEASE_SECONDS = 1.0
SOON_SECONDS = 6.0  # where a step takes as long as its pace; a busy machine, whose steps take longer, gets more
END_SECONDS = 60.0
ROOM = ("--max-sequences", "80", "--kv-blocks", "2400")  # a lone worker has room for all: nobody waits for that
FLAGS = ("--threads", "1", "--device", "cpu", "--lease", str(LEASE_SECONDS), *ROOM)
PACE = 0.01
STATUS = {"engine": 1, "worker": -9}  # of a worker whose engine, or who itself, was killed
ENDINGS = ("stop", "stop_token_ids", "min_tokens", "prompt_logprobs")


def innocent(number: int) -> Case:
    """One that nothing ends early, and whose client does nothing but read."""
    made = case(seed=3, number=number)
    job = {name: value for name, value in made.job.items() if name not in ENDINGS}
    job |= {"max_tokens": 160, "ignore_eos": True}
    return Case(id=f"innocent-{number}", job=job, labels={}, events=(999, 999))


class PoisonRun:
    """Workers that the poison can kill, clients of the innocents, and what came of it."""

    def __init__(self, victim: str, server: Server, model: Path, directory: Path, queue: str) -> None:
        self.cases = [innocent(number) for number in range(INNOCENTS)]
        self.victim, self.server, self.keys, self._model = victim, server, Keys(queue), model
        self.diary = Diary()
        begin = starter(model, server.url, queue, *FLAGS, pace=PACE, poison=victim)
        self.crew = Crew(WORKERS, begin, directory, self.diary, may_exit={STATUS[victim]})
        left = iter(self.cases)
        self.clients = Clients(server.url, queue, lambda: next(left, None), self.diary)

    def run(self) -> None:
        """Innocents first; when all of them have a token, the poison, before all others in every worker's scan."""
        self.crew.wait_ready(WORKERS)
        self.clients.start(tasks=INNOCENTS, threads=0)
        self._wait_all_started()
        with gllm.SyncClient(self.server.url, self.keys.queue) as client:
            poison = client.submit(id="poison", token_ids=[POISON], priority="high")
            with pytest.raises(gllm.JobFailed) as failure:
                client.result(poison, timeout=END_SECONDS)
        assert failure.value.code == "max_attempts"
        assert self.clients.join(END_SECONDS) == []

    def _wait_all_started(self) -> None:
        end = time.monotonic() + END_SECONDS
        while sum(bool(witness.ids) for witness in self.clients.witnesses) < INNOCENTS:
            assert time.monotonic() < end, "not every innocent has a token"
            time.sleep(0.01)

    def deaths(self) -> list[float]:
        """When (monotonic) workers died."""
        return [member.ended for member in self.crew.everybody if member.ended is not None]

    def pauses(self) -> list[tuple[float, Witness]]:
        """Seconds that innocents waited beyond the lease of the last worker that died meanwhile; the longest first."""
        found = [(pause, witness) for witness in self.clients.witnesses for pause in self._pauses_of(witness)]
        return sorted(found, key=lambda item: item[0], reverse=True)

    def _pauses_of(self, witness: Witness) -> Iterator[float]:
        for (before, _), (after, _) in itertools.pairwise(witness.heard):
            died = [end for end in self.deaths() if before < end < after]
            if died and after > max(died) + LEASE_SECONDS:
                yield self.crew.served(max(died) + LEASE_SECONDS, after)

    def summary(self) -> str:
        pauses = [pause for pause, _ in self.pauses()]
        longest, bound = max(pauses, default=0.0), self.bound()
        return f"{len(self.deaths())} deaths, {len(pauses)} waits, {longest:.2f} s at most (bound {bound:.1f} s)"

    def bound(self) -> float:
        """How long an innocent may wait, in seconds."""
        return SOON_SECONDS * self.slowness()

    def slowness(self) -> float:
        """How much longer than its pace a step took before the first worker died."""
        first = min(self.deaths())
        heard = [[item for item in witness.heard if item[0] < first] for witness in self.clients.witnesses]
        seconds = sum(each[-1][0] - each[0][0] for each in heard)
        return max(1.0, seconds / sum(each[-1][1] - each[0][1] for each in heard) / PACE)

    def faults(self) -> dict[Witness, list[str]]:
        """Innocents whose reply is not what it would have been without the poison."""
        with undisturbed(self._model, **ENGINE) as oracle:
            expected = oracle.replies(self.cases)
            found = {each: judge(each, expected[each.case.id], oracle) for each in self.clients.witnesses}
        return {witness: faults for witness, faults in found.items() if faults}


@pytest.mark.timeout(300)  # a busy machine takes its time; everything is bounded
@pytest.mark.parametrize("victim", [pytest.param("engine", marks=pytest.mark.slow), "worker"])
def test_poison_takes_down_only_itself(victim: str, multibyte_model: Path, tmp_path: Path, queue_name: str) -> None:
    with running(first_kind(), tmp_path) as server:
        run = PoisonRun(victim, server, multibyte_model, tmp_path, queue_name)
        with run.crew:
            try:
                run.run()
            finally:
                run.clients.stop()
            print(f"\n{victim}: {run.summary()}")
            assert not (faults := run.faults()), report(victim, faults, [], run.crew, run.diary)
            late = {witness: [f"waited {pause:.2f} s"] for pause, witness in run.pauses() if pause > run.bound()}
            assert not late, report(f"{victim}, bound {run.bound():.2f} s", late, [], run.crew, run.diary)
        with connect_sync(server.url) as client:
            (letter,) = [fields for _, fields in client.xrange(run.keys.dead)]
            entries = [client.xlen(stream) for stream in run.keys.streams(1)]
    assert (letter[b"id"], letter[b"reason"], letter[b"attempts"]) == (b"poison", b"max_attempts", b"4")
    assert run.crew.complaints() == []
    assert entries == [0, 0, 0]
    assert 4 <= len(run.deaths()) <= 5  # one more where a worker stalled beyond its lease and died of it all the same
