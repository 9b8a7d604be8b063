"""What a failed Redis command means. Each error is classified here, once. The clients come from `gllm.connection`."""

import asyncio
import re
from typing import Literal

from redis import exceptions as errors

Fault = Literal["transient", "group_lost", "fenced", "fatal"]

# The server cannot serve now and will again: full, read-only after a failover, loading, moving slots.
TRANSIENT_WORDS = frozenset(
    ("OOM", "MISCONF", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY", "MOVED")
)
TRANSIENT_TYPES = (
    errors.OutOfMemoryError,
    errors.ReadOnlyError,
    errors.MasterDownError,
    errors.ClusterDownError,
    errors.TryAgainError,
)
GROUP_LOST_WORDS = frozenset(("NOGROUP", "UNBLOCKED"))  # Redis 7.0 says UNBLOCKED where 8.x and Valkey say NOGROUP
CREDENTIALS = (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError)


class Fenced(Exception):
    """The job is not this worker's any more."""


def cancelled() -> bool:
    """Whether this task was told to end. A loop around Redis commands asks at each turn, because redis-py (8.1 at
    least) swallows a cancellation that comes while it connects: the loop would go on, and who cancelled it would wait.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def classify(error: BaseException) -> Fault:
    """transient: wait and go on; group_lost: make the group again at id 0; fenced: drop the job; fatal: give up."""
    if isinstance(error, Fenced):
        return "fenced"
    if isinstance(error, CREDENTIALS):  # before ConnectionError, of which redis-py derives some of them
        return "fatal"
    if isinstance(error, (errors.ConnectionError, errors.TimeoutError, OSError, *TRANSIENT_TYPES)):
        return "transient"
    word = re.match(r"-?([A-Z]+)", str(error))
    if word and word[1] in GROUP_LOST_WORDS:
        return "group_lost"
    return "transient" if word and word[1] in TRANSIENT_WORDS else "fatal"
