"""Finding the server: who is asked, how often, what follows from refusals; and when a connection leaves."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis.exceptions as errors
from redis.asyncio import ConnectionPool, Redis

from gllm.connection import connect, connect_sync
from gllm.directory import ClusterDirectory
from gllm.faults import is_transient
from gllm.links import AsyncFinder, AsyncLink, Finder, Link
from gllm.urls import Address

A, B, HOME = Address("a", 1), Address("b", 2), Address("home", 3)
SLOTS = [[0, 16383, [b"home", 3, b"id"]]]


class Asked:
    """Stands for the connection of one question."""

    def __init__(self, address: Address, answers: dict[Address, Any], log: list[Address]) -> None:
        self.address, self.answers, self.log = address, answers, log

    def connect(self) -> None:
        self.log.append(self.address)

    def send_command(self, *command: str) -> None:
        assert command == ("CLUSTER", "SLOTS")

    def read_response(self) -> Any:
        answer = self.answers.get(self.address, next(iter(self.answers.values())))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def disconnect(self) -> None:
        pass


class AsyncAsked(Asked):
    async def connect(self) -> None:  # type: ignore[override]
        super().connect()
        await asyncio.sleep(0.01)

    async def send_command(self, *command: str) -> None:  # type: ignore[override]
        super().send_command(*command)

    async def read_response(self) -> Any:
        return super().read_response()

    async def disconnect(self, *, nowait: bool) -> None:  # type: ignore[override]
        pass


def async_finder(answers: dict[Address, Any]) -> tuple[AsyncFinder, list[Address]]:
    log: list[Address] = []
    make: Callable[[Address], Any] = lambda address: AsyncAsked(address, answers, log)  # noqa: E731
    return AsyncFinder(ClusterDirectory(list(answers), "q"), make), log


def plain_finder(answers: dict[Address, Any]) -> tuple[Finder, list[Address]]:
    log: list[Address] = []
    make: Callable[[Address], Any] = lambda address: Asked(address, answers, log)  # noqa: E731
    return Finder(ClusterDirectory(list(answers), "q"), make), log


async def test_many_connections_of_one_moment_ask_once() -> None:
    finder, log = async_finder({A: SLOTS})
    assert set(await asyncio.gather(*(finder.find() for _ in range(50)))) == {HOME}
    assert log == [A]
    finder.forget()
    assert await finder.find() == HOME
    assert len(log) == 2
    assert log[1] != A


async def test_many_connections_of_one_moment_fail_once() -> None:
    finder, log = async_finder({A: errors.ConnectionError("refused")})
    found = await asyncio.gather(*(finder.find() for _ in range(50)), return_exceptions=True)
    assert {type(error) for error in found} == {errors.ConnectionError}
    assert log == [A]
    with pytest.raises(errors.ConnectionError, match="refused"):
        await finder.find()
    assert log == [A, A]


def test_threads_of_one_moment_ask_once() -> None:
    finder, log = plain_finder({A: SLOTS})
    found: list[Address] = []
    threads = [threading.Thread(target=lambda: found.append(finder.find())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert (found, log) == ([HOME] * 8, [A])


@pytest.mark.parametrize(
    ("answers", "message", "transient"),
    [
        ({A: errors.ConnectionError("one"), B: errors.TimeoutError("two")}, "one; two", True),
        ({A: errors.AuthenticationError("one"), B: errors.TimeoutError("two")}, "one; two", True),
        ({A: errors.AuthenticationError("one"), B: errors.ResponseError("two")}, "one", False),
    ],
)
async def test_search_that_all_refuse_is_over_and_any_other_goes_on(
    answers: dict[Address, Any], message: str, transient: bool
) -> None:
    for find in (async_finder(answers)[0].find, lambda: asyncio.to_thread(plain_finder(answers)[0].find)):
        with pytest.raises(errors.RedisError, match=message) as caught:
            await find()
        assert is_transient(caught.value) is transient


async def test_one_that_does_not_answer_is_passed_over_and_not_asked_first_again() -> None:
    finder, log = async_finder({A: errors.ConnectionError("refused"), B: SLOTS})
    assert (await finder.find(), log) == (HOME, [A, B])
    finder.held = lambda since: None  # type: ignore[method-assign]: as if some time had passed
    assert (await finder.find(), log) == (HOME, [A, B, B])


@pytest.mark.parametrize("text", ["7 c:9", "MOVED 7 c:9", "ASK 7 c:9", "7 :9"])
async def test_redirection_tells_whom_to_ask_next(text: str) -> None:
    asked = Address("c", 9)
    finder, log = async_finder({A: SLOTS, asked: SLOTS})
    error = errors.ResponseError(text) if text[0] in "MA" else errors.MovedError(text)
    finder.forget(error, host="c")
    await finder.find()
    assert log == [asked]


# --- a connection whose server is not the one, or not there ---


class Answers:
    """A server that answers every command but the greeting with one line; it counts its connections."""

    def __init__(self, line: bytes) -> None:
        self.line = line
        self.connections = 0
        self._open: set[asyncio.Task[None] | None] = set()

    async def __aenter__(self) -> "Answers":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = Address("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*filter(None, self._open))  # the clients are closed by now

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(asyncio.current_task())
        while data := await reader.read(4096):
            greeting = b"CLIENT" in data
            writer.write(b"+OK\r\n" * data.count(b"CLIENT") if greeting else self.line + b"\r\n")
        writer.close()


LEFT = [
    b"-READONLY You can't write against a read only replica.",
    b"-MASTERDOWN Link with MASTER is down",
    b"-CLUSTERDOWN The cluster is down",
    b"-MOVED 7 127.0.0.1:1",
    b"-ASK 7 127.0.0.1:1",
    b"-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
]
KEPT = [b"-OOM command not allowed", b"-TRYAGAIN later", b"-NOREPLICAS few", b"-ERR no", b"$-1"]


async def ask_twice(client: Any) -> None:
    for _ in range(2):
        with contextlib.suppress(errors.RedisError):
            await client.get("k")


@pytest.mark.parametrize(("line", "connections"), [(line, 2) for line in LEFT] + [(line, 1) for line in KEPT])
async def test_connection_is_left_when_its_server_is_not_the_one(line: bytes, connections: int) -> None:
    async with Answers(line) as server:
        async with connect(f"redis://{server.address}") as client:
            await ask_twice(client)
        assert server.connections == connections
        server.connections = 0
        with connect_sync(f"redis://{server.address}") as plain:
            for _ in range(2):
                with contextlib.suppress(errors.RedisError):
                    await asyncio.to_thread(plain.get, "k")
        assert server.connections == connections


@pytest.mark.parametrize("line", [LEFT[0], LEFT[3]])
async def test_server_that_is_not_the_one_is_looked_for_again_at_once(line: bytes) -> None:
    async with Answers(line) as server:
        finder, log = async_finder({A: [[0, 16383, [b"127.0.0.1", server.address.port, b"id"]]]})
        client = Redis.from_pool(ConnectionPool(AsyncLink, protocol=2, finder=finder))
        await ask_twice(client)
        assert len(log) == 2
        await client.aclose()


async def test_server_that_is_not_there_is_looked_for_again_at_once() -> None:
    finder, log = async_finder({A: [[0, 16383, [b"127.0.0.1", 1, b"id"]]]})
    await ask_twice(Redis.from_pool(ConnectionPool(AsyncLink, protocol=2, finder=finder)))
    assert len(log) == 2
    plain, plain_log = plain_finder({A: [[0, 16383, [b"127.0.0.1", 1, b"id"]]]})
    for _ in range(2):
        with pytest.raises(errors.ConnectionError, match=r"127\.0\.0\.1:1"):
            Link(protocol=2, finder=plain).connect()
    assert len(plain_log) == 2


async def test_address_is_not_believed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gllm.links.BELIEVED_SECONDS", 0.01)
    finder, log = async_finder({A: SLOTS})
    await finder.find()
    await asyncio.sleep(0.02)
    await finder.find()
    assert len(log) == 2


async def test_node_of_a_cluster_by_a_plain_url_names_the_right_kind_of_url() -> None:
    async with Answers(b"-MOVED 7 h:1") as server, connect(f"redis://{server.address}") as client:
        with pytest.raises(errors.ResponseError, match=r"a node of a cluster, use redis\+cluster://.* 7 h:1") as no:
            await client.get("k")
        assert not is_transient(no.value)


async def test_silent_one_is_not_asked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gllm.connection.ASK_SECONDS", 0.1)
    began = time.monotonic()
    promise = b"$5"  # of five bytes that never come
    async with Answers(promise) as server, connect(f"redis+cluster://{server.address}") as client:
        with pytest.raises(errors.ConnectionError):
            await client.get("k")
    assert time.monotonic() - began < 1
