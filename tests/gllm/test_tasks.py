"""Cancellations that redis-py swallows must still end what the client does; and only those."""

import asyncio
from contextlib import suppress

import pytest
import redis.exceptions as errors

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


async def test_client_ends_when_redis_py_swallows_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> None:
        raise errors.ConnectionError(await swallow())

    monkeypatch.setattr(Client, "_read", lost)
    monkeypatch.setattr(Client, "_shard_count", lost)
    async with Client("redis://127.0.0.1:1/0") as client:
        tasks = [asyncio.create_task(call) for call in (client.submit(prompt="x"), client.result("x"))]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=5)
        assert done == set(tasks)
        assert all(task.cancelled() for task in tasks)
