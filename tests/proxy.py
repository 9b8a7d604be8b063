"""A TCP proxy in front of a Redis server that tests can make misbehave."""

import asyncio
import random
import re
from contextlib import suppress

LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"
COMMAND = re.compile(rb"(?:^|\r\n)\*[0-9]+(?=\r\n)")  # the head of one; clients send several at once


class Proxy:
    """Passes bytes on, unless told otherwise.

    Set `swallow`: nothing goes either way, connections stay. `loading`: every command is answered with LOADING
    (`loadings` counts them).
    `cut`: how likely an answer is lost together with its connection, after the server has done the work. `lose`: that
    happens to the next command with these bytes in it. `delay`: seconds that each answer is late. `target`: where new
    connections lead.
    """

    def __init__(self, host: str, port: int, seed: int = 1) -> None:
        self.target = host, port
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.loading = False
        self.loadings = 0
        self.cut = 0.0
        self.delay = 0.0
        self.cuts = 0
        self.delay = 0.0
        self.lose: bytes | None = None
        self._lost = False

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.drop_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def swallow(self) -> bool:
        return not self._open.is_set()

    @swallow.setter
    def swallow(self, value: bool) -> None:
        (self._open.clear if value else self._open.set)()

    def drop_all(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._relay(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(*self.target)
        ways = [asyncio.create_task(self._up(reader, writer, forth)), asyncio.create_task(self._down(back, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            forth.close()  # before anything is awaited: the end of the test may cancel this
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _up(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forth: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            if self.lose is not None and self.lose in data:
                self.lose, self._lost = None, True
            if self.loading:
                self.loadings += 1
                writer.write(LOADING * len(COMMAND.findall(data)))
            else:
                forth.write(data)

    async def _down(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await back.read(65536):
            await self._open.wait()
            await asyncio.sleep(self.delay)
            await asyncio.sleep(self.delay)
            if self._lost or self._random.random() < self.cut:
                self.cuts, self._lost = self.cuts + 1, False
                return
            writer.write(data)
