"""Finding the server: who is asked, how often, and what follows from refusals. Without servers."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis.exceptions as errors

from gllm.directory import ClusterDirectory
from gllm.faults import is_transient
from gllm.links import AsyncFinder, Finder
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
        answer = self.answers.get(self.address, SLOTS)
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


async def test_one_that_does_not_answer_is_passed_over() -> None:
    finder, log = async_finder({A: errors.ConnectionError("refused"), B: SLOTS})
    assert (await finder.find(), log) == (HOME, [A, B])


@pytest.mark.parametrize("text", ["7 c:9", "MOVED 7 c:9", "ASK 7 c:9", "7 :9"])
async def test_redirection_tells_whom_to_ask_next(text: str) -> None:
    asked = Address("c", 9)
    finder, log = async_finder({A: SLOTS, asked: SLOTS})
    error = errors.ResponseError(text) if text[0] in "MA" else errors.MovedError(text)
    finder.forget(error, host="c")
    await finder.find()
    assert log == [asked]
