"""Readers of replies that run beside a test, and their connections."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import redis

from gllm.client import Client
from gllm.reply import Reply


async def until(condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} seconds: {what}"
        await asyncio.sleep(0.005)


async def collect(client: Client, job_id: str, last_id: str = "0-0", **more) -> list[Reply]:
    async with asyncio.timeout(20):
        return [reply async for reply in client.stream(job_id, last_id, **more)]


def joined(replies: list[Reply]) -> str:
    return "".join(reply.text for reply in replies)


@asynccontextmanager
async def reading(client: Client, job_id: str) -> AsyncIterator[tuple[list[Reply], asyncio.Task[None]]]:
    """A reader that runs beside the test; what it has read so far, and its task."""
    replies: list[Reply] = []

    async def read() -> None:
        async for reply in client.stream(job_id):
            replies.append(reply)

    task = asyncio.create_task(read())
    try:
        yield replies, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def blocked_readers(raw: redis.Redis) -> list[dict[str, str]]:
    return [row for row in raw.client_list() if row["cmd"] == "xread" and "b" in row["flags"]]


def kill_readers(raw: redis.Redis) -> None:
    for row in blocked_readers(raw):
        raw.client_kill_filter(_id=row["id"])
