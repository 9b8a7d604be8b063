"""The one door to Redis: clients from a URL, for asyncio and for plain code. The URLs stand in `gllm.urls`.

What is fixed here may not be changed by a URL's query, because the rest of gllm stands on it: RESP2 (RESP3 changes the
shapes of replies), bytes in and out, and no retries by the library (redis-py 8 repeats every command ten times, and a
plain XADD whose answer was lost would write twice). Who may repeat a command is decided where that command is known.

Each client talks to one server, also behind sentinels and in a cluster. redis-py's RedisCluster is not used: it repeats
commands, follows ASK redirections (see `gllm.directory`), asks the server for the keys of every XREAD, and has WAIT,
TIME and INFO answered by whichever node.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import redis
import redis.asyncio as aredis
from redis.asyncio.connection import ConnectionPool as AsyncPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import (
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,  # pyright: ignore[reportUnknownVariableType]
)
from redis.exceptions import RedisError
from redis.retry import Retry

from gllm.directory import ClusterDirectory, Directory, SentinelDirectory
from gllm.links import AsyncFinder, AsyncLink, AsyncTlsLink, AsyncUnixLink, Finder, Link, TlsLink, UnixLink
from gllm.urls import Target, redact, target_of

__all__ = ["connect", "connect_sync", "redact"]

CONNECT_SECONDS = 5.0  # a host that swallows packets is found out in this time, however long a blocking read may take
ASK_SECONDS = 1.0  # a sentinel or a node that is dead must not keep us long from the next one
MAX_CONNECTIONS = 10_000  # redis-py 8 stops at 100, and each reader holds one
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
ASYNC_LINKS = {"tcp": AsyncLink, "tls": AsyncTlsLink, "unix": AsyncUnixLink}
LINKS = {"tcp": Link, "tls": TlsLink, "unix": UnixLink}

Options = dict[str, Any]


def connect(url: str, *, queue: str | None = None, socket_timeout: float = 5.0, name: str = "") -> aredis.Redis:
    """An asyncio client, which connects at the first command. `socket_timeout` (seconds) must exceed any BLOCK sent.

    `queue` is what the client is for: a cluster keeps each queue on one of its nodes. Without it any primary is taken.
    Raises ValueError for a URL of an unknown scheme, an option that redis-py does not know, a file that is not there.
    """
    with _named(url):
        plan = _plan(url, queue, socket_timeout, name)
        link, retry = ASYNC_LINKS[plan.link], AsyncRetry(NoBackoff(), 0)
        link(**plan.options, retry=retry)  # an unknown option would else show at the first command
        options: Options = {"retry": retry, **plan.options}
        if (directory := plan.directory) is not None:
            options["finder"] = AsyncFinder(directory, lambda at: link(**plan.asking, **at._asdict(), retry=retry))
        return aredis.Redis.from_pool(AsyncPool(link, plan.connections, **options))


def connect_sync(url: str, *, queue: str | None = None, socket_timeout: float = 5.0, name: str = "") -> redis.Redis:
    """The same as `connect` for code without asyncio."""
    with _named(url):
        plan = _plan(url, queue, socket_timeout, name)
        link, retry = LINKS[plan.link], Retry(NoBackoff(), 0)
        link(**plan.options, retry=retry)
        options: Options = {"retry": retry, **plan.options}
        if (directory := plan.directory) is not None:
            options["finder"] = Finder(directory, lambda at: link(**plan.asking, **at._asdict(), retry=retry))
        return redis.Redis.from_pool(ConnectionPool(cast(Any, link), plan.connections, **options))


class _Plan(NamedTuple):
    """`options`: of each connection; `asking`: of those that ask the `directory` where the server is."""

    link: Literal["tcp", "tls", "unix"]
    options: Options
    connections: int
    directory: Directory | None
    asking: Options


@contextmanager
def _named(url: str) -> Generator[None]:
    try:
        yield
    except (TypeError, ValueError, RedisError) as error:
        raise ValueError(f"redis: {error}, got {redact(url)!r}") from None


def _plan(url: str, queue: str | None, socket_timeout: float, name: str) -> _Plan:
    target = target_of(url)
    found = cast(Options, parse_url(target.url))
    kind = found.pop("connection_class", None)
    connections: int = found.pop("max_connections", MAX_CONNECTIONS)
    _check_files(found)
    options = found | ({"client_name": name} if name else {}) | _fixed(socket_timeout)
    link = "tls" if kind is SSLConnection else "unix" if kind is UnixDomainSocketConnection else "tcp"
    return _Plan(link, options, connections, _directory(target, queue), _asking(target, options))


def _fixed(socket_timeout: float) -> Options:
    return {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": min(CONNECT_SECONDS, socket_timeout),
    }


def _check_files(options: Options) -> None:
    """A file that is not there would look like a network fault, and so be waited for."""
    for name in TLS_FILES:
        if (path := options.get(name)) is not None:
            try:
                open(path, "rb").close()
            except OSError as error:
                raise ValueError(f"{name}: {error.strerror}: {path!r}") from None


def _directory(target: Target, queue: str | None) -> Directory | None:
    if target.kind == "sentinel":
        return SentinelDirectory(target.addresses, target.service)
    return ClusterDirectory(target.addresses, queue) if target.kind == "cluster" else None


def _asking(target: Target, options: Options) -> Options:
    """The options of connections that ask: those of the servers but for their place, and for sentinels their user."""
    others = {"host", "port"} | (
        {"username", "password", "db", "client_name"} if target.kind == "sentinel" else set[str]()
    )
    asking = {name: value for name, value in options.items() if name not in others}
    seconds = min(ASK_SECONDS, options["socket_timeout"])
    return asking | {"socket_timeout": seconds, "socket_connect_timeout": seconds} | target.user
