"""The block pool: places of a block, reference counts, the verified index, order of eviction. No torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.blocks import BlockPool, PoolCounts, UncachedPool, fnv1a_64
from tests.engine.chains import OTHER, SPACE, chain, words


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(6, 2)


def test_fnv_is_the_published_function():
    assert fnv1a_64(b"") == 0xCBF29CE484222325
    assert fnv1a_64(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a_64(b"foobar") == 0x85944171F73967E8
    assert fnv1a_64(b"bar", fnv1a_64(b"foo")) == fnv1a_64(b"foobar")


def test_names_are_equal_in_every_process_and_order_of_history():
    script = (
        "from array import array; from engine.blocks import BlockPool; import sys\n"
        "pool = BlockPool(8, 2)\n"
        "for noise in range(int(sys.argv[1])): pool.register([pool.take()], array('i', [90, noise]), ('n',), 0, 1)\n"
        "table = [pool.take(), pool.take()]\n"
        "pool.register(table, array('i', [1, 2, 3, 4]), (('model', 'm'), ('tenant', None)), 0, 2)\n"
        "print(*[pool.name(block) for block in table])\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    said = {
        subprocess.run(
            [sys.executable, "-c", script, str(noise)], env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True, text=True, check=True,
        ).stdout
        for noise, seed in ((0, "1"), (3, "2"))
    }  # fmt: skip
    pool = BlockPool(4, 2)
    names = [pool.name(block) for block in chain(pool, words(1, 2, 3, 4))]
    assert said == {" ".join(map(str, names)) + "\n"}


def test_names_are_distinct_for_distinct_prefixes(pool):
    names = set()
    for tokens in (words(1, 2), words(2, 1), words(1, 2, 1, 2), words(3, 4, 1, 2), words(1, 2, 3, 4)):
        for space in (SPACE, OTHER):
            fresh = BlockPool(6, 2)
            names.add(fresh.name(chain(fresh, tokens, space)[-1]))
    assert len(names) == 10
    assert pool.name(pool.take()) is None


def test_life_of_a_block_from_free_to_live_to_reclaimable_and_back(pool):
    table = chain(pool, words(1, 2, 3, 4, 5, 6))
    assert pool.counts == PoolCounts(3, 0, 3)
    pool.release(table)
    pool.check([])
    assert pool.counts == PoolCounts(0, 3, 3)
    found = pool.match(words(1, 2, 3, 4, 9, 9), SPACE, 3)
    assert found == table[:2]
    assert pool.counts == PoolCounts(0, 3, 3), "a match changes nothing"
    pool.acquire(found)
    pool.acquire(found)
    pool.check([found, found])
    assert pool.counts == PoolCounts(2, 1, 3)
    pool.release(found)
    assert pool.counts.live == 2, "another still uses them"
    pool.release(found)
    assert pool.counts == PoolCounts(0, 3, 3)


def test_unregistered_blocks_go_back_to_free_and_push_nothing_out(pool):
    pool.release(chain(pool, words(1, 2)))
    tail = [pool.take() for _ in range(5)]
    pool.release(tail)
    assert pool.counts == PoolCounts(0, 1, 5)
    assert pool.evictions == 0
    assert len(pool.match(words(1, 2), SPACE, 1)) == 1


@pytest.mark.parametrize(("limit", "found"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (9, 3)])
def test_match_is_capped_and_needs_whole_blocks(pool, limit, found):
    table = chain(pool, words(1, 2, 3, 4, 5, 6))
    assert pool.match(words(1, 2, 3, 4, 5, 6, 7), SPACE, limit) == table[:found]


def test_match_stops_at_the_first_difference(pool):
    table = chain(pool, words(1, 2, 3, 4, 5, 6))
    assert pool.match(words(1, 2, 9, 4, 5, 6), SPACE, 3) == table[:1]
    assert pool.match(words(9, 2, 3, 4, 5, 6), SPACE, 3) == []
    assert pool.match(words(3, 4, 5, 6), SPACE, 2) == [], "a block is its whole prefix, not its tokens"


def test_two_namespaces_never_match(pool):
    mine = chain(pool, words(1, 2, 3, 4))
    assert pool.match(words(1, 2, 3, 4), OTHER, 2) == []
    theirs = chain(pool, words(1, 2, 3, 4), OTHER)
    assert not set(mine) & set(theirs)
    assert pool.match(words(1, 2, 3, 4), OTHER, 2) == theirs
    assert pool.match(words(1, 2, 3, 4), SPACE, 2) == mine


def test_a_namespace_is_never_taken_for_a_registration(pool):
    chain(pool, words(1, 2))
    assert pool.match(words(1, 2), (1,), 1) == []
    assert pool.match(words(1, 2), (SPACE,), 1) == []


def test_live_blocks_are_never_evicted(pool):
    live, idle = chain(pool, words(1, 2, 3, 4)), chain(pool, words(5, 6))
    pool.release(idle)
    taken = [pool.take() for _ in range(4)]
    assert pool.available == 0
    assert pool.evictions == 1
    assert not set(taken) & set(live)
    with pytest.raises(KeyError):
        pool.take()
    assert pool.match(words(1, 2, 3, 4), SPACE, 2) == live


def test_the_least_recently_released_goes_first(pool):
    first, second, third = (chain(pool, words(n, n)) for n in (1, 2, 3))
    for table in (second, third, first):
        pool.release(table)
    pool.acquire(second)
    pool.release(second)  # used again: now the youngest
    taken = [pool.take() for _ in range(6)]
    assert taken[3:] == [*third, *first, *second]


def test_leaves_are_evicted_before_their_parents(pool):
    table = chain(pool, words(1, 2, 3, 4, 5, 6))
    pool.release(table)
    for _ in range(3):
        pool.take()
    for left in (2, 1, 0):
        pool.take()
        assert len(pool.match(words(1, 2, 3, 4, 5, 6), SPACE, 3)) == left, "what is left can still be reached"


def test_a_shared_parent_outlives_the_leaves_of_both_users(pool):
    left = chain(pool, words(1, 2, 3, 4))
    right = [left[0], pool.take()]
    pool.acquire(left[:1])
    pool.register(right, words(1, 2, 5, 6), SPACE, 1, 2)
    pool.check([left, right])
    pool.release(left)
    pool.release(right)
    pool.release([pool.take() for _ in range(3)])
    taken = [pool.take() for _ in range(6)]
    assert taken[3:] == [left[1], right[1], left[0]]


def test_an_evicted_block_dies_in_the_index_in_the_same_operation(pool):
    table = chain(pool, words(1, 2))
    pool.release(table)
    taken = [pool.take() for _ in range(6)]
    assert table[0] in taken
    assert pool.match(words(1, 2), SPACE, 1) == []
    assert not pool.is_registered(table[0])
    assert pool.name(table[0]) is None
    pool.check([taken])


def test_a_duplicate_is_adopted_and_its_own_block_freed(pool):
    first = chain(pool, words(1, 2, 3, 4))
    second = [pool.take(), pool.take()]
    swaps = pool.register(second, words(1, 2, 3, 4), SPACE, 0, 2)
    assert swaps == [(0, first[0]), (1, first[1])]
    assert second == first
    pool.check([first, second])
    assert pool.counts == PoolCounts(2, 0, 4)


def test_a_duplicate_of_a_reclaimable_block_pins_it(pool):
    first = chain(pool, words(1, 2))
    pool.release(first)
    second = [pool.take()]
    assert pool.register(second, words(1, 2), SPACE, 0, 1) == [(0, first[0])]
    pool.check([second])
    assert pool.counts == PoolCounts(1, 0, 5)


def test_registering_again_changes_nothing(pool):
    table = chain(pool, words(1, 2, 3, 4))
    before = [pool.name(block) for block in table]
    assert pool.register(table, words(1, 2, 3, 4), SPACE, 0, 2) == []
    assert pool.register(table, words(1, 2, 3, 4), SPACE, 2, 2) == []
    assert [pool.name(block) for block in table] == before


def test_a_stale_parent_never_matches(pool):
    """White box: a child left behind by a broken eviction order is out of reach once its parent's block is reused."""
    table = chain(pool, words(1, 2, 3, 4))
    orphan = table[1]
    old = pool._registration[table[0]]
    pool.release(table)
    pool._reclaimable.move_to_end(orphan)  # as if it had been released after its parent
    taken = [pool.take() for _ in range(5)]
    assert table[0] in taken
    assert pool.is_registered(orphan)
    pool.register([table[0]], words(1, 2), SPACE, 0, 1)  # the same block, the same tokens, another generation
    assert pool._registration[table[0]] > old
    assert pool.match(words(1, 2, 3, 4), SPACE, 2) == [table[0]]


def test_registrations_are_never_reused(pool):
    seen: set[int] = set()
    for turn in range(20):
        table = chain(pool, words(turn, 1, turn, 2))
        numbers = {pool._registration[block] for block in table}
        assert 0 not in numbers
        assert not numbers & seen
        seen |= numbers
        pool.release(table)
        if turn % 5 == 4:
            pool.clear()


def test_available_beside_counts_what_acquiring_would_pin(pool):
    table = chain(pool, words(1, 2, 3, 4))
    assert pool.available_beside(table) == 4, "live ones cost nothing more"
    pool.release(table)
    assert pool.available == 6
    assert pool.available_beside(table) == 4
    assert pool.available_beside(table[:1]) == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, table: pool._references.__setitem__(table[0], 2),
        lambda pool, table: pool._free.append(table[0]),
        lambda pool, table: pool._free.pop(),
        lambda pool, table: pool._free.append(pool._free[0]),
        lambda pool, table: pool._reclaimable.__setitem__(table[0], None),
        lambda pool, table: pool._index.clear(),
        lambda pool, table: pool._registration.__setitem__(table[0], 0),
        lambda pool, table: pool._key.__setitem__(table[0], pool._key[table[1]]),
    ],
)
def test_check_finds_every_damage_to_the_books(pool, damage):
    table = chain(pool, words(1, 2, 3, 4))
    damage(pool, table)
    with pytest.raises(AssertionError):
        pool.check([table])


def test_the_twin_without_cache_matches_and_keeps_nothing():
    twin = UncachedPool(6, 2)
    table = [twin.take(), twin.take()]
    assert twin.register(table, words(1, 2, 3, 4), SPACE, 0, 2) == []
    assert twin.match(words(1, 2, 3, 4), SPACE, 2) == []
    twin.check([table])
    twin.release(table)
    twin.clear()
    assert twin.counts == PoolCounts(0, 0, 6)
    assert twin.evictions == 0
