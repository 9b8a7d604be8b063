"""Cancellations that redis-py swallows must still end what the client does; and only those."""

import asyncio
from contextlib import suppress

import pytest

from gllm.client import Client
from gllm.keys import Keys
from gllm.tasks import cancellable


async def swallow() -> str:
    with suppress(asyncio.CancelledError):  # as redis-py may while it sends
        await asyncio.sleep(60)
    return "done"


@pytest.mark.parametrize("fails", [False, True])
async def test_swallowed_cancellation_ends_the_task(fails: bool) -> None:
    async def command() -> str:
        answer = await swallow()
        if fails:
            raise ConnectionError(answer)
        return answer

    async def loop() -> None:
        while True:
            with suppress(ConnectionError):
                await cancellable(command())

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    assert done
    assert task.cancelled()


async def test_command_whose_own_timeout_cancels_it_is_not_taken_for_a_cancelled_task() -> None:
    async def command() -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        return "late"

    assert await cancellable(command()) == "late"


async def test_cancelled_task_may_still_cancel_its_job(redis_url: str, keys: Keys) -> None:
    async with Client(redis_url, keys.queue) as client:
        job = await client.submit(prompt="x")

        async def read() -> bool:
            try:
                await client.result(job)
            except asyncio.CancelledError:
                return await client.cancel(job)
            return False

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        async with asyncio.timeout(5):
            assert await task
