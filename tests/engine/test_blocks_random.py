"""Random operations on the pool against a slow model of it, and forced collisions of the index's hash. No torch."""

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine import blocks
from engine.blocks import BlockPool
from tests.engine.slow_pool import SlowPool

OPERATIONS = 10_000
SPACES = ((("tenant", "a"),), (("tenant", "b"),))


class Colliding:
    """A key whose hash is always the same; it still compares fully."""

    def __init__(self, parent: object, content: bytes) -> None:
        self._parts = (parent, content)

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Colliding) and self._parts == other._parts


@pytest.fixture
def collisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "block_key", Colliding)


@dataclass
class User:
    """A sequence, as far as the pool sees it."""

    tokens: "array[int]"
    space: tuple
    table: list[int]
    registered: int

    def prefixes(self, width: int, end: int) -> list[tuple]:
        return [(self.space, *self.tokens[: (index + 1) * width]) for index in range(end)]


@dataclass
class Walk:
    """Random users of one pool and of its slow model, operation by operation."""

    generator: random.Random
    width: int
    size: int
    users: list[User] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool, self.slow = BlockPool(self.size, self.width), SlowPool(self.size)
        # a small tree of prompts: few tokens, so that prefixes are shared and part at every depth
        self._roots = [[self.generator.randrange(3) for _ in range(6 * self.width)] for _ in range(3)]

    def step(self) -> None:
        acts: list[Callable[[], None]] = [self.admit] * 6 + [self.compute] * 8 + [self.grow] * 3
        acts += [self.leave] * 5 + [self.fail]
        self.generator.choice([*acts, self.clear] if self.generator.random() < 0.1 else acts)()
        self.pool.check([user.table for user in self.users])
        counts = self.pool.counts
        assert (counts.live, counts.reclaimable, counts.free) == self.slow.counts
        assert self.pool.evictions == self.slow.evictions
        assert list(self.pool._reclaimable) == self.slow.idle
        assert {block for block in range(self.size) if self.pool.is_registered(block)} == set(self.slow.content)

    def admit(self) -> None:
        count = self.generator.randrange(1, 6 * self.width)
        tokens = array("i", self.generator.choice(self._roots)[:count])
        tokens[-1] = self.generator.randrange(3)
        space = self.generator.choice(SPACES)
        limit = (count - 1) // self.width
        user = User(tokens, space, [], 0)
        matched = self.pool.match(tokens, space, limit)
        assert matched == self.slow.match(user.prefixes(self.width, limit))
        need = -(-count // self.width) - len(matched)
        if need > self.pool.available_beside(matched):
            return
        self.pool.acquire(matched)
        self.slow.acquire(matched)
        user.table, user.registered = matched, len(matched)
        for _ in range(need):
            self._take(user)
        self.users.append(user)

    def compute(self) -> None:
        """Some more of its blocks are computed, and registered."""
        for user in self.generator.sample(self.users, min(1, len(self.users))):
            end = self.generator.randint(user.registered, len(user.tokens) // self.width)
            expected = self.slow.register(user.table, user.prefixes(self.width, end))
            before = list(user.table)
            swaps = self.pool.register(user.table, user.tokens, user.space, user.registered, end)
            assert user.table == expected
            assert swaps == [(i, new) for i, (old, new) in enumerate(zip(before, expected, strict=True)) if old != new]
            user.registered = end

    def grow(self) -> None:
        for user in self.generator.sample(self.users, min(1, len(self.users))):
            user.tokens.extend(self.generator.randrange(3) for _ in range(self.width))
            if self.pool.available:
                self._take(user)
            else:
                del user.tokens[-self.width :]

    def leave(self) -> None:
        if self.users:
            self._release(self.users.pop(self.generator.randrange(len(self.users))))

    def fail(self) -> None:
        """One ends with an error: what only it holds is in doubt."""
        if self.users:
            user = self.users.pop(self.generator.randrange(len(self.users)))
            self.pool.forget(user.table)
            self.slow.forget(user.table)
            self._release(user)

    def clear(self) -> None:
        self.pool.clear()
        self.slow.clear()
        for user in self.users:
            user.registered = 0

    def _release(self, user: User) -> None:
        self.pool.release(user.table)
        self.slow.release(user.table)

    def _take(self, user: User) -> None:
        user.table.append(self.pool.take())
        self.slow.took(user.table[-1])


@pytest.mark.parametrize(("size", "width"), [(1, 2), (4, 1), (9, 2), (40, 3)])
def test_ten_thousand_random_operations_equal_the_slow_pool(size, width):
    walk = Walk(random.Random(size), width, size)
    for _ in range(OPERATIONS // 4):
        walk.step()
    assert walk.pool.evictions > (20 if size > 1 else 5)


@pytest.mark.usefixtures("collisions")
@pytest.mark.parametrize("size", [4, 12])
def test_random_operations_with_every_hash_colliding_equal_the_slow_pool(size):
    walk = Walk(random.Random(100 + size), 2, size)
    for _ in range(1500):
        walk.step()
    assert walk.pool.evictions > 20


@pytest.mark.usefixtures("collisions")
def test_colliding_prompts_are_told_apart():
    pool = BlockPool(8, 2)
    first, second = array("i", [1, 2, 3, 4]), array("i", [5, 6, 7, 8])
    tables = []
    for tokens in (first, second):
        tables.append([pool.take(), pool.take()])
        assert pool.match(tokens, SPACES[0], 2) == []
        assert pool.register(tables[-1], tokens, SPACES[0], 0, 2) == []
    assert pool.match(first, SPACES[0], 2) == tables[0]
    assert pool.match(second, SPACES[0], 2) == tables[1]
    assert pool.match(first, SPACES[1], 2) == []
