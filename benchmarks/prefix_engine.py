"""The prefix cache on a real model: what it costs where nothing is shared, what it saves where much is."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from benchmarks.figure import Figure
from benchmarks.ours import BLOCK_SIZE, Ours, Prompt, random_prompts
from engine.blocks import BlockPool

COUNTED = ("match", "available_beside", "acquire", "take", "register", "release", "forget")
ROWS = 16
MOST_COST = 1.0  # per cent of a step


class Sizes(Struct, frozen=True, kw_only=True):
    """Tokens, but for `jobs`, `chats` and `turns`."""

    strangers: int = 48
    stranger: int = 256
    new: int = 32
    jobs: int = ROWS
    shared: int = 768
    suffix: int = 32
    shared_new: int = 16
    chats: int = 4
    turns: int = 10
    system: int = 64
    question: int = 48
    answer: int = 24

    @property
    def longest(self) -> int:
        return self.system + self.turns * (self.question + self.answer)


class HostTime:
    """CPU seconds spent in a pool's operations, counted from where the scheduler calls them."""

    def __init__(self, pool: BlockPool) -> None:
        self.seconds = 0.0
        for name in COUNTED:
            setattr(pool, name, self._counted(getattr(pool, name)))

    def _counted(self, operation: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object) -> object:
            start = time.thread_time()
            try:
                return operation(*arguments)
            finally:
                self.seconds += time.thread_time() - start

        return counted


class Pair:
    """The same engine with the cache off and on, measured in turns."""

    def __init__(self, model: Path, kv_blocks: int, threads: int) -> None:
        self.off = Ours(model, prefix_cache=False, kv_blocks=kv_blocks, threads=threads)
        self.on = Ours(model, prefix_cache=True, kv_blocks=kv_blocks, threads=threads)

    def alternate(self, rounds: int, work: Callable[[Ours, int], list[float]]) -> tuple[list[float], list[float]]:
        """Medians of what `work(engine, round)` returns, cache off and on, after a round of warming up."""
        found: dict[bool, list[list[float]]] = {False: [], True: []}
        for number in range(rounds + 1):
            for cached in (False, True) if number % 2 else (True, False):
                values = work(self.on if cached else self.off, number)
                if number:
                    found[cached].append(values)
        off, on = ([statistics.median(column) for column in zip(*rows, strict=True)] for rows in found.values())
        return off, on


class Bench:
    """The three workloads. Prompts differ in each round, and are the same for both sides."""

    def __init__(self, model: Path, sizes: Sizes, threads: int, rounds: int) -> None:
        self._model, self._sizes, self._threads, self._rounds = model, sizes, threads, rounds

    def strangers(self) -> list[Figure]:
        """(a) No shared prefix at all, in a pool that is always full: every new block evicts one."""
        sizes = self._sizes
        pair = Pair(self._model, ROWS * -(-(sizes.stranger + sizes.new) // BLOCK_SIZE) + 8, self._threads)
        clocks = {id(side): HostTime(side.engine.pool) for side in (pair.off, pair.on)}
        tokens = sizes.strangers * (sizes.stranger + sizes.new)

        def work(side: Ours, number: int) -> list[float]:
            before = clocks[id(side)].seconds
            total = side.run(prompts_for(side, sizes.strangers, sizes.stranger, number), sizes.new).total
            return [total, clocks[id(side)].seconds - before]

        (total, without), (total_on, with_cache) = pair.alternate(self._rounds, work)
        stats = pair.on.engine.stats()
        assert stats.prefix_hit_tokens == 0
        assert stats.prefix_evictions > 0
        cost = with_cache - without
        return [
            Figure("time in the pool's operations, cache off, a token", without / tokens * 1e9, "ns"),
            Figure("time in the pool's operations, cache on, a token", with_cache / tokens * 1e9, "ns"),
            Figure("what the cache costs of all the time", 100 * cost / total, "%", limit=MOST_COST),
            Figure("whole run, on / off (the clock is noisy)", total_on / total, "times"),
        ]

    def sharing(self) -> list[Figure]:
        """(b) Jobs with a long prefix in common: all at once on an empty cache, and once more with one before them."""
        sizes = self._sizes
        pair = Pair(self._model, self._blocks(sizes.shared + sizes.suffix + sizes.shared_new), self._threads)

        def work(side: Ours, number: int) -> list[float]:
            (prefix,) = prompts_for(side, 1, sizes.shared, 2 * number)
            jobs = [prefix + suffix for suffix in prompts_for(side, 2 * sizes.jobs, sizes.suffix, 2 * number + 1)]
            side.clear_cache()
            before = side.engine.stats().prefix_hit_tokens
            cold = side.run(jobs[: sizes.jobs], sizes.shared_new)
            between = side.engine.stats().prefix_hit_tokens
            warm = side.run(jobs[sizes.jobs :], sizes.shared_new)
            hits = (between - before, side.engine.stats().prefix_hit_tokens - between)
            return [cold.total, warm.total, cold.first_tokens, warm.first_tokens, *hits]

        off, on = pair.alternate(self._rounds, work)
        names = ("whole batch, prefix new", "whole batch, prefix known", "last job starts, prefix new",
                 "last job starts, prefix known")  # fmt: skip
        prompts = sizes.jobs * (sizes.shared + sizes.suffix)
        return [
            *(figure for at, name in enumerate(names) for figure in faster(name, off[at], on[at])),
            Figure("hit rate, prefix new", 100 * on[4] / prompts, "%"),
            Figure("hit rate, prefix known", 100 * on[5] / prompts, "%"),
        ]

    def chats(self) -> list[Figure]:
        """(c) Chats side by side; each turn sends the whole history."""
        sizes = self._sizes
        pair = Pair(self._model, self._blocks(sizes.longest), self._threads)

        def work(side: Ours, number: int) -> list[float]:
            side.clear_cache()
            before = side.engine.stats().prefix_hit_tokens
            total, first, prompts = self._talk(side, number)
            return [total, first, (side.engine.stats().prefix_hit_tokens - before) / prompts]

        off, on = pair.alternate(self._rounds, work)
        return [
            *faster(f"{sizes.turns} turns", off[0], on[0]),
            *faster("replies start in the last turn", off[1], on[1]),
            Figure("hit rate", 100 * on[2], "%"),
        ]

    def _talk(self, side: Ours, number: int) -> tuple[float, float, int]:
        """Seconds in all, seconds until the replies of the last turn start, and prompt tokens."""
        sizes = self._sizes
        (system,) = prompts_for(side, 1, sizes.system, 100 * number)
        histories = [list(system) for _ in range(sizes.chats)]
        total, first, prompts = 0.0, 0.0, 0
        for turn in range(sizes.turns):
            questions = prompts_for(side, sizes.chats, sizes.question, 100 * number + 1 + turn)
            histories = [history + question for history, question in zip(histories, questions, strict=True)]
            prompts += sum(map(len, histories))
            run = side.run(histories, sizes.answer)
            total, first = total + run.total, run.first_tokens
            histories = [history + reply for history, reply in zip(histories, run.tokens, strict=True)]
        return total, first, prompts

    def _blocks(self, longest: int) -> int:
        return 2 * max(self._sizes.jobs, self._sizes.chats) * -(-longest // BLOCK_SIZE)


def prompts_for(side: Ours, count: int, length: int, seed: int) -> list[Prompt]:
    return random_prompts(count, length, side.engine.info.vocab_size, seed)


def faster(name: str, off: float, on: float) -> list[Figure]:
    return [
        Figure(f"{name}, cache off", off, "s"),
        Figure(f"{name}, cache on", on, "s"),
        Figure(f"{name}, times faster with the cache", off / on, "times"),
    ]
