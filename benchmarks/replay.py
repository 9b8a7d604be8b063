"""A trace through the real scheduler and pool, with a device that computes nothing: hit rates in seconds. No torch.

Requests come in the trace's order, `rows` of them at a time: the next is added when one has ended. The trace does not
say what replies were, so they are new tokens that nobody asks for again.
"""

import time
from collections.abc import Iterable
from itertools import islice

from msgspec import Struct

from benchmarks.trace import Job
from engine.blocks import BlockPool, Namespace
from engine.plan import Plan, Sampled
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence

SPACE: Namespace = (("model", "replay"),)
REPLY_TOKEN = 1  # below every vocabulary in use here, so that no reply is taken for a prompt


class Outcome(Struct, frozen=True):
    """Tokens, but for `evictions` (blocks), `preemptions`, `steps` and the seconds that scheduler and pool took."""

    hits: int
    prompts: int
    recomputed: int
    evictions: int
    preemptions: int
    steps: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.hits / self.prompts


class Replay:
    """One pass of a list of jobs through a pool. `admitted` counts those admitted so far: they are so in order."""

    def __init__(self, jobs: Iterable[Job], pool: BlockPool, *, rows: int, step_tokens: int = 2048) -> None:
        self.pool = pool
        self.admitted = 0
        self._scheduler = Scheduler(pool, max_sequences=rows, max_step_tokens=step_tokens)
        self._rows = rows
        self._coming = (self._sequence(number, job) for number, job in enumerate(jobs))
        self._queue: list[Sequence] = []  # added, not admitted

    def run(self) -> Outcome:
        """Until all jobs have ended."""
        started, steps = time.perf_counter(), 0
        self._refill()
        while (plan := self._scheduler.schedule()) is not None:
            self._note_admissions()
            self._scheduler.commit(plan, sampled(plan))
            self._refill()
            steps += 1
        assert not self._scheduler.waiting, "a job never fitted"
        counters, seconds = self._scheduler.counters, time.perf_counter() - started
        return Outcome(
            counters.prefix_hit_tokens, counters.prefix_prompt_tokens, counters.recomputed_tokens,
            self.pool.evictions, counters.preemptions, steps, seconds,
        )  # fmt: skip

    def _sequence(self, number: int, job: Job) -> Sequence:
        request = Request(id=str(number), tokens=list(job.prompt), sampling=SamplingParams(max_tokens=job.new_tokens))
        limit = len(job.prompt) + job.new_tokens
        assert limit - 1 <= self.pool.size * self.pool.block_size, f"job {number} can never fit"
        return Sequence(request, limit=limit, end_ids=frozenset(), namespace=SPACE, engine_seed=0)

    def _refill(self) -> None:
        free = self._rows - len(self._scheduler.running) - len(self._scheduler.waiting)
        for sequence in islice(self._coming, free):
            self._queue.append(sequence)
            self._scheduler.add(sequence)

    def _note_admissions(self) -> None:
        waiting = [sequence for sequence in self._queue if not sequence.admissions]
        self.admitted += len(self._queue) - len(waiting)
        self._queue = waiting


def sampled(plan: Plan) -> Sampled:
    """What a device brings: a token wherever one is sampled."""
    count = len(plan.entries)
    tokens = [REPLY_TOKEN if entry.samples else None for entry in plan.entries]
    return Sampled(tokens, [False] * count, [None] * count, [None] * count)
