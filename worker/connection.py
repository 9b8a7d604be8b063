"""What a failed Redis command means to a worker. Which errors pass is known to `gllm.faults`."""

import asyncio
import re
from typing import Literal

from gllm.faults import is_transient

Fault = Literal["transient", "group_lost", "fatal"]

GROUP_LOST_WORDS = frozenset(("NOGROUP", "UNBLOCKED"))  # Redis 7.0 says UNBLOCKED where 8.x and Valkey say NOGROUP


def cancelled() -> bool:
    """Whether this task was told to end. A loop around Redis commands asks at each turn, because redis-py (8.1 at
    least) swallows a cancellation that comes while it connects: the loop would go on, and who cancelled it would wait.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def classify(error: BaseException) -> Fault:
    """transient: wait and go on; group_lost: make the group again at id 0; fatal: give up."""
    if is_transient(error) or isinstance(error, OSError):
        return "transient"
    word = re.match(r"-?([A-Z]+)", str(error))
    return "group_lost" if word and word[1] in GROUP_LOST_WORDS else "fatal"
