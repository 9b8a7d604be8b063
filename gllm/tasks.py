"""What asyncio tasks owe their callers."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def cancellable(awaitable: Awaitable[T]) -> T:
    """Awaits a Redis command, and ends the task if it was cancelled meanwhile.

    redis-py sends through asyncio.wait_for, which in Python 3.11 swallows a cancellation that comes as sending ends:
    a loop around such commands would go on, and whoever cancelled it would wait.
    """
    before = _cancelling()
    try:
        return await awaitable
    finally:
        if _cancelling() > before:  # not above 0: a task may use the client while it cleans up after a cancellation
            raise asyncio.CancelledError


def _cancelling() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
