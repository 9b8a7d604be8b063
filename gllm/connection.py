"""The one door to Redis: clients from a URL, for asyncio and for plain code. Schemes: redis, rediss and unix.

What is fixed here may not be changed by a URL's query, because the rest of gllm stands on it: RESP2 (RESP3 changes the
shapes of replies), bytes in and out, and no retries by the library (redis-py 8 repeats every command ten times, and a
plain XADD whose answer was lost would write twice). Who may repeat a command is decided where that command is known.
"""

import asyncio
import random
import re
import time
from typing import Any, cast

import redis
import redis.asyncio as aredis
from redis.asyncio.connection import ConnectionPool as AsyncPool
from redis.asyncio.connection import parse_url as parse_url_async
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, parse_url  # pyright: ignore[reportUnknownVariableType]
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,  # noqa: A004 (redis-py's name)
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004 (redis-py's name)
    TryAgainError,
)
from redis.retry import Retry

CONNECT_SECONDS = 5.0  # a host that swallows packets is found out in this time, however long a blocking read may take
MAX_CONNECTIONS = 10_000  # redis-py 8 stops at 100, and each blocking reader holds one

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 2.0  # seconds between two tries of the same command
_PASSWORDS = re.compile(r"(?P<user>://[^:@/]*:)[^@]*(?=@)|(?P<key>[?&]password=)[^&#]*")
_TRANSIENT_WORDS = (
    *("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "OOM", "MISCONF", "NOREPLICAS"),
    "BUSY ",  # a script runs for too long; BUSYGROUP is something else
)
_TRANSIENT_ANSWERS = (ReadOnlyError, ClusterDownError, TryAgainError, OutOfMemoryError)  # redis-py cuts off their word
_REFUSALS = (AuthenticationError, AuthorizationError)  # redis-py files these under ConnectionError


def is_transient(error: BaseException) -> bool:
    """Whether the same command may work in a while: Redis is away, starting, failing over, busy, full or read-only."""
    if isinstance(error, ConnectionError | TimeoutError):
        return not isinstance(error, _REFUSALS)
    return isinstance(error, _TRANSIENT_ANSWERS) or (
        isinstance(error, ResponseError) and str(error).startswith(_TRANSIENT_WORDS)
    )


class Patience:
    """How long one caller bears with a Redis that is away: growing, jittered pauses, `seconds` of them in a row."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        """To be called after each success."""
        self._since: float | None = None
        self._pause = FIRST_PAUSE

    async def wait(self, error: RedisError) -> None:
        """Sleeps before the next try. Raises the error when it is not transient or has lasted too long."""
        now = time.monotonic()
        self._since = self._since or now
        if not is_transient(error) or now - self._since >= self._seconds:
            raise error
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def connect(url: str, *, socket_timeout: float = 5.0, name: str = "") -> aredis.Redis:
    """An asyncio client, which connects at the first command. `socket_timeout` (seconds) must exceed any BLOCK sent.

    Raises ValueError for a URL of an unknown scheme or with an option that redis-py does not know.
    """
    retry = AsyncRetry(NoBackoff(), 0)
    try:
        pool = AsyncPool(**_options(dict(parse_url_async(url)), retry, socket_timeout, name))
        pool.connection_class(**pool.connection_kwargs)  # an unknown option would else show at the first command
    except (TypeError, ValueError) as error:
        raise ValueError(f"redis: {error}, got {redact(url)!r}") from None
    return aredis.Redis.from_pool(pool)


def connect_sync(url: str, *, socket_timeout: float = 5.0, name: str = "") -> redis.Redis:
    """The same as `connect` for code without asyncio."""
    retry = Retry(NoBackoff(), 0)
    try:
        pool = ConnectionPool(**_options(cast(dict[str, Any], parse_url(url)), retry, socket_timeout, name))
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"redis: {error}, got {redact(url)!r}") from None
    return redis.Redis.from_pool(pool)


def redact(url: str) -> str:
    """The URL with its password hidden, for logs and messages."""
    return _PASSWORDS.sub(lambda match: (match["user"] or match["key"]) + "***", url)


def _options(from_url: dict[str, Any], retry: object, socket_timeout: float, name: str) -> dict[str, Any]:
    fixed = {
        "protocol": 2,
        "decode_responses": False,
        "retry": retry,
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": min(CONNECT_SECONDS, socket_timeout),
    }
    named = {"client_name": name} if name else {}
    return {"max_connections": MAX_CONNECTIONS, **from_url, **named, **fixed}
