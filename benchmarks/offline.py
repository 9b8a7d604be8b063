"""The cache that knows the future: which block to give up when it is known what will be asked for. No torch.

The rule is Belady's: evict the reclaimable block whose next use lies farthest in the order of arrival, and of blocks
with the same next use the deepest. A parent is used whenever its child is, so its next use is never later: leaves go
before their parents by themselves, and what is kept can be reached. For one request at a time this is the optimum for
a cache that, like ours, must hold every block of what it computes: blocks cost the same, so the exchange argument for
paging holds. With several at a time it is the same rule on the same scheduler, a yardstick rather than a bound: what
runs is pinned, and a request cannot find what another computes just then, whoever evicts.
"""

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.trace import Job
from engine.blocks import BlockPool, Parent

NEVER = 1 << 60
ROOT, UNKNOWN = 0, -1


class Future:
    """Which jobs, by number, will ask for which block. Blocks are numbered by their whole prefix."""

    def __init__(self, jobs: Iterable[Job], block_size: int) -> None:
        self._prefixes: dict[tuple[int, bytes], int] = {}
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        self._left: dict[int, int] = {}  # when a block was used last, in blocks filled by then
        self._filled = 0
        self.distances: list[int] = []  # of each use of a block that was there before: blocks filled in between
        for number, job in enumerate(jobs):
            self._read(number, job, block_size)

    def _read(self, number: int, job: Job, block_size: int) -> None:
        parent, path, found = ROOT, list[int](), 0
        for start in range(0, len(job.prompt) - block_size + 1, block_size):
            key = (parent, job.prompt[start : start + block_size].tobytes())
            parent = self._prefixes.setdefault(key, len(self._prefixes) + 1)
            path.append(parent)
            if start + block_size < len(job.prompt):  # at least one token runs: a last block is never matched
                self._uses[parent].append(number)
                found += parent in self._left
        self.distances += [self._filled - self._left[prefix] for prefix in path[:found]]
        self._filled += -(-(len(job.prompt) + job.new_tokens - 1) // block_size) - found
        self._left.update(dict.fromkeys(path, self._filled))

    def prefix(self, parent: int, content: bytes) -> int:
        """The number of a block; UNKNOWN for one that no prompt has (it holds a reply)."""
        return self._prefixes.get((parent, content), UNKNOWN)

    def next_use(self, prefix: int, after: int) -> int:
        """The first job from number `after` on that asks for the block; NEVER if none does."""
        uses = self._uses.get(prefix, [])
        index = bisect_left(uses, after)
        return uses[index] if index < len(uses) else NEVER

    @property
    def distinct(self) -> int:
        return len(self._prefixes)

    @property
    def asked_again(self) -> int:
        """Distinct blocks that a job asks for after the one that computed it."""
        return sum(1 for uses in self._uses.values() if len(uses) > 1)


class OfflinePool(BlockPool):
    """A pool that evicts by the future. `admitted()` says how many jobs have been admitted; they are so in order."""

    def __init__(self, blocks: int, block_size: int, future: Future) -> None:
        super().__init__(blocks, block_size)
        self.admitted: Callable[[], int] = lambda: 0
        self._future = future
        self._prefix = [UNKNOWN] * blocks
        self._depth = [0] * blocks
        self._block_of: dict[int, int] = {}  # registration -> block
        self._stamp = [0] * blocks
        self._heap: list[tuple[int, int, int, int]] = []  # (-next use, -depth, block, stamp): stale unless stamps agree

    def release(self, table: Sequence[int]) -> None:
        super().release(table)
        for block in table:
            if block in self._reclaimable:
                self._stamp[block] += 1
                use = self._future.next_use(self._prefix[block], self.admitted())
                heapq.heappush(self._heap, (-use, -self._depth[block], block, self._stamp[block]))

    def _pop_victim(self) -> int:
        while True:
            _, _, block, stamp = heapq.heappop(self._heap)
            if stamp == self._stamp[block] and block in self._reclaimable:
                del self._reclaimable[block]
                return block

    def _enter(self, block: int, key: Any, origin: tuple[Parent, bytes]) -> None:
        super()._enter(block, key, origin)
        parent, content = origin
        self._block_of[self._registration[block]] = block
        above = self._block_of[parent] if isinstance(parent, int) else None
        self._depth[block] = 0 if above is None else self._depth[above] + 1
        self._prefix[block] = self._future.prefix(ROOT if above is None else self._prefix[above], content)

    def _unregister(self, block: int) -> None:
        del self._block_of[self._registration[block]]
        super()._unregister(block)
