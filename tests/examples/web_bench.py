"""A reader of the web example's server that can do what browsers do, and what they never do."""

import asyncio
import json
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

LIMIT_SECONDS = 30.0


class Event(msgspec.Struct, frozen=True):
    """A server-sent event."""

    id: str
    data: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    status: int
    head: str
    body: str

    @property
    def events(self) -> list[Event]:
        return [event_of(block) for block in self.body.split("\n\n") if "data: " in block]


def event_of(block: str) -> Event:
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    return Event(fields.get("id", ""), json.loads(fields["data"]))


def text_of_events(events: list[Event]) -> str:
    return "".join(event.data.get("text", "") for event in events)


class Stream:
    """An open stream of events."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader

    async def block(self) -> str:
        """What comes up to the next empty line."""
        async with asyncio.timeout(LIMIT_SECONDS):
            return (await self._reader.readuntil(b"\n\n")).decode().removesuffix("\n\n")

    async def read(self, count: int) -> list[Event]:
        """The next so many events."""
        found: list[Event] = []
        while len(found) < count:
            block = await self.block()
            found += [event_of(block)] if "data: " in block else []
        return found


class Web:
    """The example's server, asked over TCP."""

    def __init__(self, site: Any, port: int) -> None:
        self.site = site
        self.port = port

    @asynccontextmanager
    async def raw(self, data: bytes) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """A whole answer: for a stream, up to its end."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return await self.send(self._head(method, path, len(data), headers) + data)

    async def send(self, data: bytes) -> Answer:
        async with self.raw(data) as (reader, _), asyncio.timeout(LIMIT_SECONDS):
            answer = (await reader.read()).decode()
        head, _, body = answer.partition("\r\n\r\n")
        return Answer(int(head.split(" ")[1]), head, body)

    @asynccontextmanager
    async def stream(self, job: str, after: str = "0-0.0") -> AsyncIterator[Stream]:
        """As a page opens one. It goes away without a word afterwards."""
        async with self.raw(self._head("GET", f"/jobs/{job}/events?after={after}", 0, {})) as (reader, _):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK"), head
            yield Stream(reader)

    def _head(self, method: str, path: str, length: int, headers: dict[str, str]) -> bytes:
        fields = {"Host": f"127.0.0.1:{self.port}", "Content-Length": str(length)}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        return "\r\n".join([f"{method} {path} HTTP/1.1", *map(": ".join, fields.items()), "", ""]).encode()
