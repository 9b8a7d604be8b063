"""What a failed Redis command means: whether waiting may cure it, and how long one caller waits."""

import asyncio
import random
import re
import ssl
import time
from collections.abc import Iterator

from redis.exceptions import (
    AskError,
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

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 2.0  # seconds between two tries of the same command
_TRANSIENT_WORDS = (
    *("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "OOM", "MISCONF", "NOREPLICAS"),
    "BUSY ",  # a script runs for too long; BUSYGROUP is something else
    *("MOVED ", "ASK "),  # as redis-py before 8 has them outside of its cluster client; see AskError below
    *("UNBLOCKED force", "UNBLOCKED client"),  # a primary was demoted under a blocked read, or somebody woke it
)
# redis-py cuts off the word of these. AskError is also MOVED: the queue's slot is moving, or has moved
_TRANSIENT_ANSWERS = (ReadOnlyError, ClusterDownError, TryAgainError, OutOfMemoryError, AskError)
_REFUSALS = (AuthenticationError, AuthorizationError)  # redis-py files these under ConnectionError
_IN_PIPELINE = re.compile(r"Command # \d+ \(.*\) of pipeline caused error: (?:\([\"'])?", re.DOTALL)
# What OpenSSL says of certificates and settings that do not fit; a connection cut in the handshake is none of these
_TLS_REFUSAL = re.compile(r"CERT|ALERT_(?!INTERNAL|BAD_RECORD|USER)|WRONG_VERSION|UNSUPPORTED|PEM|NO_START_LINE|KEY")


def is_transient(error: BaseException) -> bool:
    """Whether the same command may work in a while: Redis is away, starting, failing over, busy, full or read-only."""
    if isinstance(error, ConnectionError | TimeoutError):
        return not isinstance(error, _REFUSALS) and not _has_lasting_cause(error)
    return isinstance(error, _TRANSIENT_ANSWERS) or (
        isinstance(error, ResponseError) and _IN_PIPELINE.sub("", str(error)).startswith(_TRANSIENT_WORDS)
    )


def _has_lasting_cause(error: BaseException) -> bool:
    """Whether a connection fails for a reason that stays: certificates, a password, a host name that is none."""
    cause = error.__cause__
    if isinstance(cause, RedisError) and not is_transient(cause):
        return True
    return isinstance(cause, ValueError) or any(map(_is_tls_refusal, _chain(error)))


def _is_tls_refusal(error: BaseException) -> bool:
    return isinstance(error, ssl.SSLError) and _TLS_REFUSAL.search(error.reason or "") is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
