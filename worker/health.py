"""The worker's state, and the one small port that tells it: /livez, /readyz and /metrics.

Live means: do not restart me. Ready means: I am claiming jobs. A worker that waits for Redis is live and not ready.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple

from worker.metrics import Metrics

State = Literal["starting", "ready", "draining", "failed"]

REQUEST_SECONDS = 5.0  # a client that sends no whole request in this time is cut off, or it would hold a task for ever
MAX_HEADER_BYTES = 16 * 1024  # a scraper sends some hundred; more is no scraper
PLAIN = "text/plain; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error",
           503: "Service Unavailable"}  # fmt: skip


class Health:
    """starting -> ready -> draining, and failed from anywhere; nothing leads out of failed.

    `block` and `unblock` name what keeps a worker from being ready for a while (Redis is away); the state stays.
    """

    def __init__(self) -> None:
        self.state: State = "starting"
        self.reason = ""
        self._blocks: dict[str, str] = {}

    @property
    def live(self) -> bool:
        return self.state != "failed"

    @property
    def ready(self) -> bool:
        return self.state == "ready" and not self._blocks

    def to(self, state: State, reason: str = "") -> None:
        if self.state == "failed" or (self.state == "draining" and state != "failed"):
            return
        self.state, self.reason = state, reason

    def block(self, name: str, reason: str) -> None:
        self._blocks[name] = reason

    def unblock(self, name: str) -> None:
        self._blocks.pop(name, None)

    def describe(self) -> str:
        """One line for people: the state, why, and what is in the way."""
        head = f"{self.state}: {self.reason}" if self.reason else self.state
        if not self._blocks:
            return head
        return f"{head}, but not now; " + "; ".join(f"{name}: {why}" for name, why in sorted(self._blocks.items()))


class Address(NamedTuple):
    host: str
    port: int


class PortError(OSError):
    """The metrics port cannot be opened; the message names host, port and the settings to change."""


class Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = PLAIN


class _Pages:
    """What each path answers."""

    def __init__(self, health: Health, metrics: Metrics) -> None:
        self._health = health
        self._metrics = metrics
        self._open: set[asyncio.Task[None]] = set()
        self._pages: dict[str, Callable[[], Answer]] = {
            "/livez": lambda: self._probe(self._health.live),
            "/readyz": lambda: self._probe(self._health.ready),
            "/metrics": lambda: Answer(200, self._metrics.render(), PROMETHEUS),
        }

    def _probe(self, good: bool) -> Answer:
        return Answer(200 if good else 503, self._health.describe().encode() + b"\n")

    def answer(self, request_line: bytes) -> tuple[Answer, bool]:
        """The answer to a request line, and whether its body is to be sent (not for HEAD)."""
        words = request_line.decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/"):
            return Answer(400, b"not an HTTP request\n"), True
        method, target, _ = words
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return Answer(404, b"try /livez, /readyz or /metrics\n"), method != "HEAD"
        if method not in ("GET", "HEAD"):
            return Answer(405, b"GET and HEAD only\n"), True
        try:
            return page(), method != "HEAD"
        except Exception as error:  # a page that cannot be made is this request's trouble, never the worker's
            return Answer(500, f"{type(error).__name__}: {error}\n".encode()), method != "HEAD"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: one request, one answer."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._exchange(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client went away, dawdled or talked too much; there is nobody to tell
        finally:
            self._open.discard(task)
            writer.close()

    async def close(self) -> None:
        """Cut open connections off: a client that keeps one open would hold up the worker's exit."""
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        answer, with_body = self.answer(head.partition(b"\r\n")[0])
        writer.write(_head(answer))
        if with_body:
            writer.write(answer.body)
        await writer.drain()


def _head(answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status} {REASONS[answer.status]}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@asynccontextmanager
async def serve(host: str, port: int, health: Health, metrics: Metrics) -> AsyncIterator[Address]:
    """Serve until the block ends; yields where (port 0 takes any free one). Raises PortError."""
    pages = _Pages(health, metrics)
    try:
        server = await asyncio.start_server(pages.serve, host, port, limit=MAX_HEADER_BYTES)
    except (OSError, OverflowError) as error:
        raise PortError(_explain(host, port, error)) from error
    try:
        bound = server.sockets[0].getsockname()
        yield Address(bound[0], bound[1])
    finally:
        server.close()
        await pages.close()


def _explain(host: str, port: int, error: OSError | OverflowError) -> str:
    setting = "--metrics-port (GLLM_METRICS_PORT)"
    if isinstance(error, OverflowError):
        return f"{setting}: 0 to 65535 expected, got {port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"metrics port {port} on {host} is taken, perhaps by another worker: "
            f"choose another with {setting}; 0 takes any free one"
        )
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"metrics host {host!r} is no address of this machine: change --metrics-host (GLLM_METRICS_HOST)"
    return f"metrics port {port} on {host} cannot be opened: {error.strerror or error}; see {setting}"
