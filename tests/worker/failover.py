"""A failover as its victims see it: keys of a queue go back to older copies, while workers publish and clients read."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from redis.asyncio import Redis

from gllm import Client
from gllm.keys import Keys
from gllm.reply import ReplyError
from tests.worker.queue_bench import until

DUMP_ALL = """
local found = {}
for i, key in ipairs(redis.call('KEYS', ARGV[1])) do
  found[i] = {key, redis.call('DUMP', key), redis.call('PTTL', key)}
end
return found
"""
DELETE_ALL = "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end"

Copy = dict[
    str, tuple[bytes, int] | None
]  # by key: its dump and its life in ms (0: none), or None where it was not there


async def copy_of(redis: Redis, *keys: str) -> Copy:
    """What these keys hold now, all at the same moment."""
    async with redis.pipeline(transaction=True) as together:
        for key in keys:
            together.dump(key)
            together.pttl(key)
        found = await together.execute()
    pairs = zip(found[::2], found[1::2], strict=True)
    return {key: None if dump is None else (dump, max(0, life)) for key, (dump, life) in zip(keys, pairs, strict=True)}


async def copy_of_queue(redis: Redis, keys: Keys) -> Copy:
    """The whole queue at one moment: what a replica has that is a little behind."""
    found = await cast(Awaitable[list[Any]], redis.eval(DUMP_ALL, 0, f"{keys.base}*"))
    return {key.decode(): (dump, max(0, life)) for key, dump, life in found}


async def restore(redis: Redis, copy: Copy, *, instead_of: str = "") -> None:
    """Set keys back to a copy, in one go; and nothing else is left of those that match the pattern."""
    async with redis.pipeline(transaction=True) as together:
        together.eval(DELETE_ALL, 0, instead_of)
        for key, held in copy.items():
            together.delete(key)
            if held is not None:
                together.restore(key, held[1], held[0])
        await together.execute()


async def fail_over(redis: Redis, keys: Keys, copy: Copy) -> None:
    """The replica becomes the server: what it had not heard of never happened."""
    await restore(redis, copy, instead_of=f"{keys.base}*")


class Reader:
    """A client that reads one reply, and what came of it: ids and text so far, and the error that it was told."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.id = job_id
        self.ids: list[int] = []
        self.text = ""
        self.error: ReplyError | None = None
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client: Client) -> None:
        try:
            async for reply in client.stream(self.id):
                self.ids += reply.ids
                self.text += reply.text
        except ReplyError as error:
            self.error = error

    async def wait(self, count: int) -> None:
        """Until it has so many tokens, or its end."""
        await until(self._has(count), f"{count} tokens of {self.id}", seconds=20)

    def _has(self, count: int) -> Callable[[], Awaitable[bool]]:
        async def enough() -> bool:
            return len(self.ids) >= count or self.task.done()

        return enough

    async def end(self) -> None:
        """Until it has read the terminal event, or was told an error."""
        async with asyncio.timeout(20):
            await self.task
