"""What the pool's operations cost a token, on one thread, without torch. CPU time: others' turns do not count."""

import random
import statistics
import time
from array import array
from collections.abc import Callable

from benchmarks.figure import Figure
from engine.blocks import BlockPool, Namespace

SPACE: Namespace = (("model", "0123456789abcdef"), ("adapter", None), ("tenant", "someone"), ("salt", None))
TOKENS = 100_000
MOST_NS, MOST_MS = 50.0, 5.0
LOOK_UP, REGISTER, TAKE, HOLD = "look-up", "registration", "taking, each block evicts another", "acquire and release"


class Prompt:
    """One prompt of TOKENS tokens on its way through a pool; `seconds` of CPU by operation."""

    def __init__(self, pool: BlockPool, seed: int) -> None:
        generator = random.Random(seed)
        self.seconds: dict[str, float] = {}
        self._pool, self._blocks = pool, TOKENS // pool.block_size
        self._tokens = array("i", [generator.randrange(49152) for _ in range(TOKENS)])
        self._table: list[int] = []

    def live(self) -> dict[str, float]:
        """Take, register, look up, acquire, release."""
        pool, blocks = self._pool, self._blocks
        self._timed(TAKE, lambda: self._table.extend(pool.take() for _ in range(blocks)))
        self._timed(REGISTER, lambda: pool.register(self._table, self._tokens, SPACE, 0, blocks))
        self._timed(LOOK_UP, lambda: pool.match(self._tokens, SPACE, blocks))
        assert pool.match(self._tokens, SPACE, blocks) == self._table
        pool.release(self._table)
        self._timed(HOLD, self._hold)
        return self.seconds

    def _hold(self) -> None:
        self._pool.acquire(self._table)
        self._pool.release(self._table)

    def _timed(self, name: str, work: Callable[[], object]) -> None:
        start = time.thread_time()
        work()
        self.seconds[name] = time.thread_time() - start


def measure(block_size: int, rounds: int) -> list[Figure]:
    """Medians over prompts that find the pool full of others' content."""
    pool = BlockPool(2 * (TOKENS // block_size), block_size)
    lives = [Prompt(pool, seed).live() for seed in range(rounds + 2)][2:]
    assert pool.evictions == rounds * (TOKENS // block_size)
    found = {name: statistics.median(life[name] for life in lives) for name in (LOOK_UP, REGISTER, TAKE, HOLD)}
    figures = [Figure(f"{name}, a token", seconds / TOKENS * 1e9, "ns") for name, seconds in found.items()]
    both = (found[LOOK_UP] + found[REGISTER]) / TOKENS * 1e9
    return [
        *figures,
        Figure("look-up and registration together, a token", both, "ns", limit=MOST_NS),
        Figure(f"look-up of {TOKENS:,} tokens", found[LOOK_UP] * 1e3, "ms", limit=MOST_MS),
    ]
