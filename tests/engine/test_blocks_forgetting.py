"""Content that the pool gives up before it is evicted: all of it, or what is in doubt. No torch."""

import pytest

from engine.blocks import BlockPool, PoolCounts
from tests.engine.chains import SPACE, chain, words


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(6, 2)


def test_clear_forgets_all_and_leaves_live_blocks_with_their_users(pool):
    live, idle = chain(pool, words(1, 2, 3, 4)), chain(pool, words(5, 6))
    pool.release(idle)
    pool.clear()
    pool.check([live])
    assert pool.counts == PoolCounts(2, 0, 4)
    assert pool.match(words(1, 2, 3, 4), SPACE, 2) == []
    assert pool.register(live, words(1, 2, 3, 4), SPACE, 0, 2) == []
    assert pool.match(words(1, 2, 3, 4), SPACE, 2) == live
    pool.release(live)
    pool.clear()
    assert pool.counts == PoolCounts(0, 0, 6)


def test_forgotten_blocks_are_out_of_the_index_and_free_once_released(pool):
    table = chain(pool, words(1, 2, 3, 4))
    pool.forget(table)
    pool.check([table])
    assert pool.match(words(1, 2, 3, 4), SPACE, 2) == []
    pool.release(table)
    assert pool.counts == PoolCounts(0, 0, 6)


def test_blocks_that_another_uses_are_not_forgotten_until_it_forgets_them_too(pool):
    left = chain(pool, words(1, 2, 3, 4))
    right = left[:1]
    pool.acquire(right)
    pool.forget(left)
    pool.check([left, right])
    assert pool.match(words(1, 2, 3, 4), SPACE, 2) == right
    right.append(pool.take())
    assert pool.register(right, words(1, 2, 5, 6), SPACE, 1, 2) == [], "who goes on may register what it computes"
    pool.release(left)
    pool.forget(right)
    pool.release(right)
    assert pool.counts == PoolCounts(0, 0, 6)


def test_what_hangs_on_a_forgotten_block_is_out_of_reach_and_ages_out(pool):
    table = chain(pool, words(1, 2, 3, 4, 5, 6))
    pool.release(table)
    pool.acquire(table[:1])
    pool.forget(table[:1])
    pool.release(table[:1])
    pool.check([])
    assert pool.counts == PoolCounts(0, 2, 4)
    assert [pool.name(block) for block in table] == [None] * 3
    again = chain(pool, words(1, 2))
    assert pool.match(words(1, 2, 3, 4, 5, 6), SPACE, 3) == again
    assert {pool.take() for _ in range(5)} >= set(table[1:])


def test_registering_behind_a_forgotten_parent_is_refused(pool):
    table = chain(pool, words(1, 2, 3, 4))
    pool.clear()
    with pytest.raises(AssertionError, match="cleared under its sequence"):
        pool.register(table, words(1, 2, 3, 4), SPACE, 1, 2)
