"""A web page that streams a reply and survives a reload: asyncio, gllm's client, and nothing else.

    python examples/web/server.py --redis redis://localhost:6379/0      # and open http://127.0.0.1:8080

The page (page.html) makes a random id for each job, and asks for

    PUT    /jobs/<id>           submit {"prompt": "…"}; again with the same id is the same job
    GET    /jobs/<id>/events    the reply's events; the id of each one is the place to go on from
    DELETE /jobs/<id>           cancel

A connection that ends leaves its job alone: the reply is in Redis, and the next connection reads on from there.
"""

import argparse
import asyncio
import json
import logging
import re
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import msgspec
from redis.exceptions import RedisError
from small_http import MAX_HEAD_BYTES, Refused, Request, finish, gone, head, policy_of, read_request, respond, send

import gllm

MAX_CONNECTIONS = 100  # each stream has a connection to Redis of its own
BEAT_SECONDS = 15.0  # between signs of life, so that nobody on the way takes a connection for dead
RETRY_MS = 1000  # before the page connects again
SAMPLING = {"max_tokens": 512, "temperature": 0.4, "repetition_penalty": 1.1}
JOB = re.compile(r"[0-9a-f]{32}")
END = "9007199254740991-0"  # the entry id of every last event
PLACE = re.compile(rf"([0-9]{{1,9}}-[0-9]{{1,20}}|{END})\.([0-9]{{1,10}})")  # entry id, and characters up to there


class Site:
    """Serves the page and what it asks for, while `listening`."""

    def __init__(self, client: gllm.Client, page: bytes) -> None:
        self._client = client
        self._page = page
        self._policy = policy_of(page.decode())
        self.connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncGenerator[int]:
        """Yields the port: with 0 the system chooses one. Only this machine can connect."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", port, limit=MAX_HEAD_BYTES)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self.connections:
                task.cancel()
            await asyncio.gather(*self.connections, return_exceptions=True)

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            # The other side left or is too slow, or this server ends.
            with suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
                await self._answer(reader, writer)
                await finish(writer)
        finally:
            writer.transport.abort()
            self.connections.discard(task)

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            request = await read_request(reader)
            if len(self.connections) > MAX_CONNECTIONS:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "Too many pages are open.")
            await self._route(request, reader, writer)
        except Refused as refused:
            await respond(writer, refused.status, str(refused).encode())
        except gllm.InvalidJob as error:
            await respond(writer, HTTPStatus.BAD_REQUEST, f"The prompt was not accepted: {error}".encode())
        except gllm.QueueFull:
            await respond(writer, HTTPStatus.SERVICE_UNAVAILABLE, b"Too many jobs are waiting.")
        except RedisError as error:
            logging.warning("redis: %s", error)
            await respond(writer, HTTPStatus.SERVICE_UNAVAILABLE, b"Redis cannot be reached.")

    async def _route(self, request: Request, reader: StreamReader, writer: StreamWriter) -> None:
        match request.method, request.path:
            case "GET", [""]:
                await respond(writer, HTTPStatus.OK, self._page, "text/html", self._policy)
            case "PUT", ["jobs", job] if JOB.fullmatch(job):
                question = {"role": "user", "content": prompt_of(request.body)}
                await self._client.submit(id=name_of(job), messages=[question], **SAMPLING)
                await respond(writer, HTTPStatus.NO_CONTENT)
            case "GET", ["jobs", job, "events"] if JOB.fullmatch(job):
                await self._stream(name_of(job), place_of(request), reader, writer)
            case "DELETE", ["jobs", job] if JOB.fullmatch(job):
                await self._client.cancel(name_of(job))
                await respond(writer, HTTPStatus.NO_CONTENT)
            case _:
                raise Refused(HTTPStatus.NOT_FOUND, "There is nothing here.")

    async def _stream(self, job: str, place: tuple[str, int], reader: StreamReader, writer: StreamWriter) -> None:
        """Until the reply ends, the page goes away, or it reads too slowly: whatever happens first."""
        if place[0] == END:
            await respond(writer, HTTPStatus.NO_CONTENT)  # tells a browser not to connect again
            return
        writer.write(head(HTTPStatus.OK, "text/event-stream"))
        tasks = [asyncio.create_task(work) for work in (self._copy(job, place, writer), beat(writer), gone(reader))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _copy(self, job: str, place: tuple[str, int], writer: StreamWriter) -> None:
        """The events behind a place. When Redis is away for too long this just ends: the page will come back."""
        last, characters = place
        await send(writer, f"retry: {RETRY_MS}\n\n")
        try:
            async with aclosing(self._client.stream(job, last, characters=characters)) as replies:
                async for reply in replies:
                    data = msgspec.json.encode(reply.event).decode()
                    await send(writer, f"id: {reply.entry}.{reply.characters}\ndata: {data}\n\n")
        except gllm.ReplyError as error:
            lost = {"type": "error", "code": type(error).__name__, "message": str(error), "retryable": False}
            await send(writer, f"data: {json.dumps(lost)}\n\n")
        except RedisError as error:
            logging.warning("redis: %s", error)


async def beat(writer: StreamWriter) -> None:
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        writer.write(b": still here\n\n")


def name_of(job: str) -> str:
    """The job's id in Redis. The prefix keeps the page away from the jobs of other producers, whatever it asks for."""
    return f"web-{job}"


def place_of(request: Request) -> tuple[str, int]:
    """Where to go on: a browser that connects again by itself sends a header, a page after a reload asks in its URL."""
    asked = request.headers.get("Last-Event-ID") or request.query.get("after", ["0-0.0"])[0]
    match = PLACE.fullmatch(asked)
    if match is None:
        raise Refused(HTTPStatus.BAD_REQUEST, "This is no place in a reply.")
    return match[1], int(match[2])


def prompt_of(body: bytes) -> str:
    try:
        prompt = json.loads(body)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        raise Refused(HTTPStatus.BAD_REQUEST, "Write a prompt first.")
    return prompt


async def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a page that streams replies, to this machine only.")
    parser.add_argument("--redis", default="redis://localhost:6379/0")
    parser.add_argument("--queue", default="default")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    page = Path(__file__).with_name("page.html").read_bytes()
    client = gllm.Client(given.redis, given.queue, max_queue=1000, patience=10)
    async with client, Site(client, page).listening(given.port) as port:
        print(f"Open http://127.0.0.1:{port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
