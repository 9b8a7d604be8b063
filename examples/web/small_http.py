"""As much of HTTP/1.1 as a page on one's own machine needs, on asyncio's streams: one request a connection."""

import asyncio
import io
import re
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from hashlib import sha256
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from urllib.parse import parse_qs, urlsplit

MAX_HEAD_BYTES, MAX_BODY_BYTES = 16 * 1024, 64 * 1024
ASK_SECONDS = 10.0  # a request takes no longer to arrive
SLOW_SECONDS = 20.0  # a reader that takes nothing for so long is let go
LOCAL = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]+)?")
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True)
class Request:
    """`path` is in parts, without the first slash."""

    method: str
    path: list[str]
    query: dict[str, list[str]]
    headers: Message
    body: bytes


class Refused(Exception):
    """An answer that the page did not hope for: its status, and what to tell people."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Raises Refused for what our page never asks, whoever did."""
    async with asyncio.timeout(ASK_SECONDS):
        try:
            first, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            method, target, _ = first.decode("ascii").split(" ")
            url, headers = urlsplit(target), parse_headers(io.BytesIO(rest))
            length = int(headers.get("Content-Length", "0"))
        except (asyncio.LimitOverrunError, HTTPException, ValueError):
            raise Refused(HTTPStatus.BAD_REQUEST, "This is no request that can be read.") from None
        if not LOCAL.fullmatch(headers.get("Host", "")):  # another site's name may lead to this machine, too
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "Open this page as http://localhost or http://127.0.0.1.")
        if not 0 <= length <= MAX_BODY_BYTES or "Transfer-Encoding" in headers:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "This is too long.")
        body = await reader.readexactly(length)
    return Request(method, url.path.split("/")[1:], parse_qs(url.query), headers, body)


async def respond(
    writer: asyncio.StreamWriter, status: HTTPStatus, body: bytes = b"", kind: str = "text/plain", policy: str = NOTHING
) -> None:
    """Answers with all of a body."""
    length = [f"Content-Length: {len(body)}"] if status is not HTTPStatus.NO_CONTENT else []
    writer.write(head(status, kind, policy, *length) + body)
    await drained(writer)


def head(status: HTTPStatus, kind: str, policy: str = NOTHING, *more: str) -> bytes:
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {kind}; charset=utf-8",
        f"Content-Security-Policy: {policy}",
        *("Cache-Control: no-store", "Referrer-Policy: no-referrer", "X-Content-Type-Options: nosniff"),
        *("Connection: close", *more, "", ""),
    )
    return "\r\n".join(lines).encode()


async def send(writer: asyncio.StreamWriter, text: str) -> None:
    """A piece of a body that is sent as it comes. Raises TimeoutError when the other side does not take it."""
    writer.write(text.encode())
    await drained(writer)


async def drained(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(SLOW_SECONDS):
        await writer.drain()


async def gone(reader: asyncio.StreamReader) -> None:
    """Waits for the other side to leave: it has nothing more to say."""
    with suppress(OSError):
        await reader.read(1)


async def finish(writer: asyncio.StreamWriter) -> None:
    """Sends what is still to be sent, and closes."""
    async with asyncio.timeout(SLOW_SECONDS):
        writer.close()
        await writer.wait_closed()


def policy_of(page: str) -> str:
    """For Content-Security-Policy: only the page's own script and style run, and talk to this server only."""

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in found)

    own = f"script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; img-src data:"
    return f"{NOTHING}; {own}"
