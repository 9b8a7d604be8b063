"""Reads many replies over few connections.

A blocked XREAD knows only the streams that it was asked for. When one is added it is woken with CLIENT UNBLOCK, so that
no first token waits for it; a user who may not do that reads in short turns, and sees a first event up to
SHORT_SECONDS late.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gllm.connection import connect
from gllm.faults import Patience, is_transient
from gllm.keys import Keys
from gllm.tasks import cancellable
from worker.load.record import Record

BLOCK_SECONDS = 2.0
SHORT_SECONDS = 0.02
MARGIN_SECONDS = 5.0
RACE_SECONDS = 0.001  # between two tries to wake a read that is on its way to the server
ENTRIES = 128

Answer = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]


class Reader:
    """One connection. `run` until cancelled; it raises redis-py's error when a lost Redis has not come back."""

    def __init__(self, url: str, keys: Keys, patience: float) -> None:
        self._keys = keys
        self._pool = connect(url, queue=keys.queue, socket_timeout=BLOCK_SECONDS + MARGIN_SECONDS, name="gllm-bench")
        self._records: dict[bytes, Record] = {}
        self._last: dict[bytes, bytes] = {}
        self._patience = Patience(patience)
        self._any = asyncio.Event()
        self._block = BLOCK_SECONDS
        self._client: int | None = None
        self._round = 0
        self._woken = 0  # the round that somebody wakes
        self._blocked = False
        self._wakes: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Its reply is read until it has ended. To be called before the job is submitted."""
        name = self._keys.out(record.id).encode()
        self._records[name], self._last[name] = record, b"0-0"
        self._any.set()
        if self._blocked and self._woken != self._round:
            self._woken = self._round
            task = asyncio.create_task(self._wake(self._round))
            self._wakes.add(task)
            task.add_done_callback(self._wakes.discard)

    async def run(self) -> None:
        try:
            while True:
                await self._turn()
        finally:
            await self._pool.aclose()

    async def _turn(self) -> None:
        if not self._last:
            self._any.clear()
            await self._any.wait()
        connection = self._pool.client()
        try:
            await self._read_on(connection)
        except RedisError as error:
            await self._patience.wait(error)
            self._last = dict.fromkeys(self._last, b"0-0")  # another server may answer now: compare what it has
        finally:
            self._client = None
            await connection.aclose()

    async def _read_on(self, connection: Redis) -> None:
        """Over one connection, as long as there is something to read."""
        await self._introduce(connection)
        while self._last:
            self._round += 1
            self._blocked = True
            try:
                found = await cancellable(self._read(connection, max(1, int(self._block * 1000))))
            finally:
                self._blocked = False
            self._patience.reset()
            self._take(found)
            if found and self._last:  # the server wakes with the first stream that has something: the others now
                self._take(await cancellable(self._read(connection, None)))

    async def _introduce(self, connection: Redis) -> None:
        try:
            self._client = await connection.client_id()  # pyright: ignore[reportUnknownMemberType]
        except ResponseError as error:
            if is_transient(error):
                raise
            self._block = SHORT_SECONDS

    async def _read(self, connection: Redis, block: int | None) -> Answer:
        return cast(Answer, await connection.xread(cast(Any, self._last), ENTRIES, block))

    def _take(self, found: Answer) -> None:
        now = time.monotonic()
        for stream, entries in found:
            record = self._records.get(stream)
            if record is not None:
                self._entries(stream, record, entries, now)

    def _entries(
        self, stream: bytes, record: Record, entries: Iterable[tuple[bytes, dict[bytes, bytes]]], now: float
    ) -> None:
        for entry, fields in entries:
            self._last[stream] = entry
            record.take(entry, fields, now)
        if record.done.is_set():
            self.forget(record)

    def forget(self, record: Record) -> None:
        """Its reply is not read on."""
        name = self._keys.out(record.id).encode()
        self._records.pop(name, None)
        self._last.pop(name, None)

    async def _wake(self, turn: int) -> None:
        """Ends the blocking read of this turn. It may not have reached the server yet: then again."""
        while self._blocked and self._round == turn and self._client is not None and self._block == BLOCK_SECONDS:
            try:
                if await self._pool.client_unblock(self._client):  # pyright: ignore[reportUnknownMemberType]
                    return
            except ResponseError as error:
                if not is_transient(error):
                    self._block = SHORT_SECONDS
                return
            except RedisError:
                return  # the reader meets it, too
            await asyncio.sleep(RACE_SECONDS)
