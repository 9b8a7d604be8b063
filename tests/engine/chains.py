"""Chains of registered blocks, for tests of the pool."""

from array import array

from engine.blocks import BlockPool

SPACE = (("model", "m"), ("tenant", None))
OTHER = (("model", "m"), ("tenant", "t"))


def words(*tokens: int) -> "array[int]":
    return array("i", tokens)


def chain(pool: BlockPool, tokens: "array[int]", space: tuple = SPACE) -> list[int]:
    """Take and register blocks for all whole blocks of `tokens`."""
    table = [pool.take() for _ in range(len(tokens) // pool.block_size)]
    pool.register(table, tokens, space, 0, len(table))
    return table
