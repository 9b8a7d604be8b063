"""Connections of redis-py, taught two things: to ask where their server is, and to leave one that is not it any more.

After a failover an old primary may live on as a replica: it answers READONLY (in a cluster MOVED) for ever, so whoever
keeps the connection never recovers. It is closed, and the next command connects anew: to what the host's name leads to
by then, or to what sentinels and cluster nodes say.
"""
# redis-py leaves many of its own types open
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import redis.asyncio.connection as aio
import redis.connection as plain
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,  # noqa: A004 (redis-py's name)
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from gllm.directory import Directory
from gllm.faults import is_transient
from gllm.urls import Address

BELIEVED_SECONDS = 1.0  # how long an address is not asked for again: many connections of one moment need one answer
STRAYED = (ReadOnlyError, ClusterDownError)  # the latter is also MASTERDOWN
REDIRECTION = re.compile(r"^(?:(?:MOVED|ASK) )?\d+ (?P<host>\S*):(?P<port>\d+)$")  # redis-py 8 cuts off the word
STRAYED_WORDS = (
    *("MASTERDOWN", "CLUSTERDOWN"),  # as redis-py before 8 has them outside of its cluster client
    "UNBLOCKED force",  # what a blocked read is told when its primary becomes a replica
)


class _Belief:
    """Where the server is, as far as the last answer said."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._address: Address | None = None
        self._error: RedisError | None = None
        self._asked = -BELIEVED_SECONDS

    def forget(self, error: RedisError | None = None, host: str = "") -> None:
        """The server is not where it was thought to be; what the error says of its place is not lost."""
        self._address = None
        self.directory.distrust()
        if error is not None and (named := REDIRECTION.search(str(error))):
            self.directory.prefer(Address(named["host"] or host, int(named["port"])))

    def held(self, since: float) -> Address | None:
        """The address if it is fresh. Raises what another asked for in vain after `since`, when ours began."""
        if self._error is not None and self._asked >= since:
            raise ConnectionError(str(self._error)) from self._error
        return self._address if time.monotonic() < self._asked + BELIEVED_SECONDS else None

    def learned(self, address: Address, by: Address) -> Address:
        self.directory.prefer(by)
        self._address, self._asked, self._error = address, time.monotonic(), None
        return address

    def failed(self, errors: list[RedisError]) -> RedisError:
        """What to raise when none of those that were asked knew."""
        lasting = [error for error in errors if not is_transient(error)]
        refused = lasting and len(lasting) == len(errors)  # one of them that is set up wrongly is no reason to give up
        self._error = lasting[0] if refused else ConnectionError("; ".join(map(str, errors)))
        self._asked = time.monotonic()
        return self._error


class AsyncFinder(_Belief):
    """Asks for the server's address. `make` builds the connection for one question."""

    def __init__(self, directory: Directory, make: Callable[[Address], aio.AbstractConnection]) -> None:
        super().__init__(directory)
        self._make = make
        self._lock = asyncio.Lock()

    async def find(self) -> Address:
        since = time.monotonic()
        async with self._lock:
            return self.held(since) or await self._look()

    async def _look(self) -> Address:
        errors: list[RedisError] = []
        for address in self.directory.to_ask():
            try:
                return self.learned(self.directory.read(address, await self._ask(address)), address)
            except RedisError as error:
                errors.append(error)
        raise self.failed(errors)

    async def _ask(self, address: Address) -> Any:
        connection = self._make(address)
        try:
            await connection.connect()
            await connection.send_command(*self.directory.command)
            return await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)


class Finder(_Belief):
    """The same for plain code."""

    def __init__(self, directory: Directory, make: Callable[[Address], plain.AbstractConnection]) -> None:
        super().__init__(directory)
        self._make = make
        self._lock = threading.Lock()

    def find(self) -> Address:
        since = time.monotonic()
        with self._lock:
            return self.held(since) or self._look()

    def _look(self) -> Address:
        errors: list[RedisError] = []
        for address in self.directory.to_ask():
            try:
                return self.learned(self.directory.read(address, self._ask(address)), address)
            except RedisError as error:
                errors.append(error)
        raise self.failed(errors)

    def _ask(self, address: Address) -> Any:
        connection = self._make(address)
        try:
            connection.connect()
            connection.send_command(*self.directory.command)
            return connection.read_response()
        finally:
            connection.disconnect()


def _strayed(error: ResponseError) -> bool:
    text = str(error)
    return isinstance(error, STRAYED) or text.startswith(STRAYED_WORDS) or REDIRECTION.match(text) is not None


def _leave(error: RedisError, finder: _Belief | None, host: str) -> None:
    if finder is not None:
        finder.forget(error, host)
    elif REDIRECTION.match(str(error)):
        message = f"this is a node of a cluster, use redis+cluster:// (or rediss+cluster://): {error}"
        raise ResponseError(message) from error


class _AsyncLink(aio.AbstractConnection if TYPE_CHECKING else object):
    """`finder` is asked before each connect; without one the server is where the options say."""

    def __init__(self, *, finder: AsyncFinder | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.finder = finder

    async def _connect(self) -> None:
        if self.finder is None:
            return await super()._connect()
        self.host, self.port = await self.finder.find()
        try:
            await super()._connect()
        except OSError:
            self.finder.forget()
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if _strayed(error):
                await self.disconnect(nowait=True)
                _leave(error, self.finder, getattr(self, "host", ""))
            raise


class AsyncLink(_AsyncLink, aio.Connection):
    pass


class AsyncTlsLink(_AsyncLink, aio.SSLConnection):
    pass


class AsyncUnixLink(_AsyncLink, aio.UnixDomainSocketConnection):
    pass


class _Link(plain.AbstractConnection if TYPE_CHECKING else object):
    """The same for plain code."""

    def __init__(self, *, finder: Finder | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.finder = finder

    def _connect(self) -> Any:
        if self.finder is None:
            return super()._connect()
        self.host, self.port = self.finder.find()
        try:
            return super()._connect()
        except OSError:
            self.finder.forget()
            raise

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except ResponseError as error:
            if _strayed(error):
                self.disconnect()
                _leave(error, self.finder, getattr(self, "host", ""))
            raise


class Link(_Link, plain.Connection):
    pass


class TlsLink(_Link, plain.SSLConnection):
    pass


class UnixLink(_Link, plain.UnixDomainSocketConnection):
    pass
