"""Hit rates of a trace at several pool sizes, beside an unlimited cache and one that knows the future. No torch."""

from collections.abc import Sequence

from msgspec import Struct

from benchmarks.figure import Figure
from benchmarks.offline import Future, OfflinePool
from benchmarks.replay import Outcome, Replay
from benchmarks.trace import Job, Scale, ideal_hit_rate
from engine.blocks import BlockPool
from worker.load.traces import Request

VOCABULARY = range(100, 49152)  # far from the reply token; wide enough that blocks differ


class Setting(Struct, frozen=True, kw_only=True):
    """`rows` requests at a time; sizes are blocks of `block_size` tokens, the context is tokens."""

    context: int
    block_size: int
    rows: int
    pools: tuple[int, ...]


class Comparison:
    """One trace, replayed on several pools."""

    def __init__(self, requests: Sequence[Request], setting: Setting) -> None:
        self._setting = setting
        self._ideal = ideal_hit_rate(requests)
        self.scale = Scale.fitting(requests, setting.context, setting.block_size)
        self._jobs: list[Job] = [self.scale.job(request, VOCABULARY) for request in requests]
        self._future = Future(self._jobs, setting.block_size)

    def figures(self) -> list[Figure]:
        return [*self._about(), *self._unlimited(), *(f for size in self._setting.pools for f in self._at(size))]

    def _about(self) -> list[Figure]:
        future, distances = self._future, sorted(self._future.distances)
        found = [
            Figure("requests", len(self._jobs), ""),
            Figure("prompt tokens after scaling", sum(len(job.prompt) for job in self._jobs), ""),
            Figure("distinct blocks of prompts", future.distinct, "blocks"),
            Figure("of them never asked for again", 100 * (1 - future.asked_again / future.distinct), "%"),
        ]
        for share in (0.5, 0.9):
            reach = distances[int(share * (len(distances) - 1))] if distances else 0
            found.append(Figure(f"filled between two uses of a block, {share:.0%} of uses", reach, "blocks"))
        return found

    def _unlimited(self) -> list[Figure]:
        everything = sum(self._need(job) for job in self._jobs)
        running = self._replay(BlockPool(everything, self._setting.block_size))
        one = Replay(self._jobs, BlockPool(everything, self._setting.block_size), rows=1).run()
        return [
            Figure("hit rate of the trace's own blocks, unlimited, one at a time", 100 * self._ideal, "%"),
            Figure("hit rate, unlimited, one at a time", 100 * one.hit_rate, "%"),
            Figure(f"hit rate, unlimited, {self._setting.rows} at a time", 100 * running.hit_rate, "%"),
            Figure("scheduler and pool, a request", 1e6 * running.seconds / len(self._jobs), "µs"),
        ]

    def _at(self, size: int) -> list[Figure]:
        if max(self._need(job) for job in self._jobs) > size:
            return []  # its longest request could never run
        ours = self._replay(BlockPool(size, self._setting.block_size))
        best = self._offline(size)
        name = f"{size:,} blocks"
        return [
            Figure(f"hit rate, {name}", 100 * ours.hit_rate, "%"),
            Figure(f"hit rate, {name}, evicting by the future", 100 * best.hit_rate, "%"),
            Figure(f"evictions, {name}", ours.evictions, "blocks"),
            Figure(f"preemptions, {name}", ours.preemptions, ""),
        ]

    def _replay(self, pool: BlockPool) -> Outcome:
        return Replay(self._jobs, pool, rows=self._setting.rows).run()

    def _offline(self, size: int) -> Outcome:
        pool = OfflinePool(size, self._setting.block_size, self._future)
        replay = Replay(self._jobs, pool, rows=self._setting.rows)
        pool.admitted = lambda: replay.admitted
        return replay.run()

    def _need(self, job: Job) -> int:
        return -(-(len(job.prompt) + job.new_tokens) // self._setting.block_size)
