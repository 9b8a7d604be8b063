"""The pool as a page of obvious, slow Python: contents by prefix, users by counting, order by a list."""

from collections import Counter


class SlowPool:
    """`used` counts users by block, `content` has registered blocks' whole prefixes, `idle` is in order of eviction."""

    def __init__(self, blocks: int) -> None:
        self.free, self.idle, self.evictions = set(range(blocks)), [], 0
        self.used: Counter[int] = Counter()
        self.content: dict[int, tuple] = {}

    def match(self, prefixes: list[tuple]) -> list[int]:
        found = []
        for prefix in prefixes:
            at = [block for block, content in self.content.items() if content == prefix]
            if not at:
                break
            found += at
        return found

    def acquire(self, blocks: list[int]) -> None:
        self.used.update(blocks)
        self.idle = [block for block in self.idle if block not in blocks]

    def took(self, block: int) -> None:
        """The pool gave out this block: it must be a free one, or else the next in order."""
        assert block in self.free if self.free else block == self.idle[0]
        if not self.free:
            self.evictions += 1
            del self.content[self.idle.pop(0)]
        self.free.discard(block)
        self.used[block] = 1

    def register(self, table: list[int], prefixes: list[tuple]) -> list[int]:
        """The table that the sequence has from now on."""
        for index, prefix in enumerate(prefixes):
            there = self.match(prefixes[: index + 1])[index:]
            if not there:
                self.content[table[index]] = prefix
            elif there != [table[index]]:
                self.acquire(there)
                self.release([table[index]])
                table = [*table[:index], *there, *table[index + 1 :]]
        return table

    def release(self, table: list[int]) -> None:
        for block in reversed(table):
            self.used[block] -= 1
            if not self.used[block] and block in self.content:
                self.idle.append(block)
            elif not self.used[block]:
                self.free.add(block)

    def forget(self, table: list[int]) -> None:
        lost = [self.content.pop(block) for block in table if block in self.content and self.used[block] == 1]
        for block, prefix in self.content.items():
            if any(prefix[: len(start)] == start for start in lost):
                self.content[block] = (object(),)  # kept, and out of reach for ever

    def clear(self) -> None:
        self.free.update(self.idle)
        self.idle, self.content = [], {}

    @property
    def counts(self) -> tuple[int, int, int]:
        return sum(1 for users in self.used.values() if users), len(self.idle), len(self.free)
