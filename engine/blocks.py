"""The KV block pool: reference counts, the verified prefix index, and reclaim in LRU order. No torch.

A block is in exactly one of three places:

    free ──take──▶ live ──release──▶ reclaimable ──acquire──▶ live     (registered: its content can be matched)
      ▲             │                     │
      └──release────┘ (not registered)    └──take (evicted: the content is given up)──▶ live

Which tokens of a sequence own which KV:

    tokens      0 ............ registered ............ computed ............ len(tokens)
    blocks      [ shared or matchable, full ][ own, full or partly filled ][ not yet computed ]
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

Namespace = tuple[Any, ...]  # a tagged tuple: everything that must not be shared; the parent of a chain's first block
Parent = int | Namespace
_FNV_OFFSET, _FNV_PRIME, _MASK64 = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1


def block_key(parent: Parent, content: bytes) -> Any:
    """The identity of a block: its parent's registration and its tokens. The dict compares both, never a hash alone."""
    return (parent, content)


def fnv1a_64(data: bytes, start: int = _FNV_OFFSET) -> int:
    """FNV-1a, 64 bits (draft-eastlake-fnv), over `data`, going on from `start`."""
    digest = start
    for byte in data:
        digest = ((digest ^ byte) * _FNV_PRIME) & _MASK64
    return digest


class PoolCounts(Struct, frozen=True):
    """How many blocks are where. The three always sum to the pool's size."""

    live: int
    reclaimable: int
    free: int


class BlockPool:
    """Reference-counted KV blocks with prefix reuse.

    Order of eviction: least recently released first, and within a chain its leaves before their parents. `release`
    upholds this by pushing a table's tail ahead of its head; it suffices because whoever holds a registered block holds
    its registered parent too (`register` adopts the registered block when two sequences computed the same one).
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.size = blocks
        self.block_size = block_size
        self.evictions = 0
        self._free = list(range(blocks - 1, -1, -1))
        self._reclaimable: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * blocks
        self._registration = [0] * blocks  # 0: not registered; numbers are never reused, so a stale parent cannot match
        self._key: list[Any] = [None] * blocks
        self._origin: list[tuple[Parent, bytes] | None] = [None] * blocks
        self._index: dict[Any, int] = {}
        self._next_registration = 1

    # -- looking: pure --------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out now."""
        return len(self._free) + len(self._reclaimable)

    @property
    def counts(self) -> PoolCounts:
        free, reclaimable = len(self._free), len(self._reclaimable)
        return PoolCounts(self.size - free - reclaimable, reclaimable, free)

    def match(self, tokens: "array[int]", namespace: Namespace, limit: int) -> list[int]:
        """The blocks of the longest registered prefix of `tokens`, at most `limit` of them. Changes nothing."""
        found: list[int] = []
        parent: Parent = namespace
        width = self.block_size
        for start in range(0, limit * width, width):
            block = self._index.get(block_key(parent, tokens[start : start + width].tobytes()))
            if block is None:
                break
            found.append(block)
            parent = self._registration[block]
        return found

    def available_beside(self, matched: Iterable[int]) -> int:
        """Blocks that `take` could hand out once `matched` is acquired."""
        return self.available - sum(1 for block in matched if self._references[block] == 0)

    def name(self, block: int) -> int | None:
        """The public name of a registered block: chained FNV-1a 64 over its parent's name and its token words.

        Equal in every process for equal prefixes; for events, affinity and tests, never for look-up. None if the block
        is not registered, or hangs on one that was forgotten.
        """
        origin = {self._registration[other]: self._origin[other] for other in self._index.values()}
        contents: list[bytes] = []
        parent: Parent = self._registration[block]
        while isinstance(parent, int):
            if (known := origin.get(parent)) is None:
                return None
            parent, content = known
            contents.append(content)
        digest = fnv1a_64(repr(parent).encode())
        for content in reversed(contents):
            digest = fnv1a_64(content, digest)
        return digest

    # -- taking and giving back -----------------------------------------------------------------------------------

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more user of each of these registered blocks (pins what `match` found)."""
        for block in blocks:
            if self._references[block] == 0:
                del self._reclaimable[block]
            self._references[block] += 1

    def take(self) -> int:
        """A block of one's own: a free one, else the least recently released reclaimable one, which is evicted."""
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        return block

    def release(self, table: Sequence[int]) -> None:
        """Give back a table, tail first, so that leaves are evicted before their parents."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._registration[block]:
                    self._reclaimable[block] = None
                else:
                    self._free.append(block)

    # -- the index ------------------------------------------------------------------------------------------------

    def register(
        self, table: list[int], tokens: "array[int]", namespace: Namespace, first: int, end: int
    ) -> list[tuple[int, int]]:
        """Make blocks `first` … `end` - 1 of `table` matchable; blocks before `first` are registered already.

        Their KV must be computed and their tokens real. Where the same content is registered already, that block is
        adopted: `table` is changed and (index, block) is returned, for the device's copy of the table.
        """
        swaps: list[tuple[int, int]] = []
        parent: Parent = self._registration[table[first - 1]] if first else namespace
        assert parent, f"block {table[first - 1]} should be registered: the index was cleared under its sequence"
        width = self.block_size
        for index in range(first, end):
            content = tokens[index * width : (index + 1) * width].tobytes()
            key = block_key(parent, content)
            registered = self._index.get(key)
            if registered is None:
                self._enter(table[index], key, (parent, content))
            elif registered != table[index]:
                self._adopt(table, index, registered)
                swaps.append((index, registered))
            parent = self._registration[table[index]]
        return swaps

    def forget(self, table: Iterable[int]) -> None:
        """Take blocks whose content is in doubt out of the index, where this table is their only user.

        What others use stays until the last of them forgets it: it is the registered parent of what they compute.
        """
        for block in table:
            if self._registration[block] and self._references[block] == 1:
                self._unregister(block)

    def clear(self) -> None:
        """Forget all registered content. Live blocks stay with their users, who may register them again."""
        for block in list(self._index.values()):
            self._unregister(block)
        self._free.extend(self._reclaimable)
        self._reclaimable.clear()

    def is_registered(self, block: int) -> bool:
        return self._registration[block] != 0

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Re-derive the books from all tables in use; raises AssertionError with the arithmetic."""
        references = [0] * self.size
        for table in tables:
            for block in table:
                references[block] += 1
        assert references == self._references, f"references {self._references}, tables say {references}"
        live = sum(1 for count in references if count)
        free, reclaimable = len(self._free), len(self._reclaimable)
        assert free + reclaimable + live == self.size, f"{free=} + {reclaimable=} + {live=} != {self.size}"
        assert len(set(self._free)) == free, f"a block is free twice: {sorted(self._free)}"
        assert all(not self._registration[b] and not references[b] for b in self._free), "a free block is in use"
        assert all(self._registration[b] and not references[b] for b in self._reclaimable), "a reclaimable block is not"
        registered = sorted(b for b in range(self.size) if self._registration[b])
        assert registered == sorted(self._index.values()), f"index {self._index}, registered {registered}"
        assert all(self._index[self._key[b]] == b for b in registered), "the index points elsewhere"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _evict(self) -> int:
        block = self._pop_victim()
        self._unregister(block)
        self.evictions += 1
        return block

    def _pop_victim(self) -> int:
        """The order of eviction, in one place: the least recently released. KeyError when none is reclaimable."""
        block, _ = self._reclaimable.popitem(last=False)
        return block

    def _enter(self, block: int, key: Any, origin: tuple[Parent, bytes]) -> None:
        assert not self._registration[block], f"block {block} is registered under another parent"
        self._registration[block] = self._next_registration
        self._next_registration += 1
        self._key[block], self._origin[block] = key, origin
        self._index[key] = block

    def _adopt(self, table: list[int], index: int, registered: int) -> None:
        self.acquire([registered])
        own, table[index] = table[index], registered
        self.release([own])

    def _unregister(self, block: int) -> None:
        del self._index[self._key[block]]
        self._registration[block] = 0
        self._key[block] = self._origin[block] = None


class UncachedPool(BlockPool):
    """The pool with the prefix cache off: nothing matches, nothing is registered, nothing is ever reclaimable."""

    def match(self, tokens: "array[int]", namespace: Namespace, limit: int) -> list[int]:
        return []

    def register(
        self, table: list[int], tokens: "array[int]", namespace: Namespace, first: int, end: int
    ) -> list[tuple[int, int]]:
        return []
