"""Fixtures for everything that needs Redis: real servers, a queue of one's own per test, and the check for leaks."""

import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis as redis_sync
from redis.asyncio import Redis

from gllm.connection import connect, connect_sync
from gllm.keys import GROUP, Keys
from tests.servers import Server, binaries, require
from tests.worker.queue_bench import QueueBench

PERMANENT = ("jobs:", "dead", "bell", "workers", "meta", "delayed")
RELEASED = b"-released"


def pytest_configure() -> None:
    """What tests start hears Ctrl-C and hang-ups, also where pytest was told to ignore them (by `&` or `nohup`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """One server of each kind for all tests; each is started when it is first asked for."""
    running: dict[str, Server] = {}

    def get(kind: str) -> Server:
        if kind not in running:
            server = Server(binaries()[kind], tmp_path_factory.mktemp(kind))
            server.start()
            running[kind] = server
        return running[kind]

    yield get
    for server in running.values():
        server.stop()


@pytest.fixture(params=require(binaries()))
def server_kind(request: pytest.FixtureRequest) -> str:
    """A test that uses this, `redis_url`, `redis` or `own_server` runs once on each kind of server."""
    return request.param


@pytest.fixture
def redis_url(server_kind: str, shared_servers: Callable[[str], Server]) -> str:
    """A server shared with other tests: use only the keys of `queue_name`, and leave the server alone."""
    return shared_servers(server_kind).url


@pytest.fixture
def own_server(server_kind: str, tmp_path: Path) -> Iterator[Server]:
    """A running server of the test's own, which it may flush, stop, start and freeze."""
    server = Server(binaries()[server_kind], tmp_path)
    server.start()
    yield server
    server.stop(kill=True)


@pytest.fixture
def queue_name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def keys(queue_name: str, redis_url: str) -> Iterator[Keys]:
    """The keys of the test's queue. Afterwards every one of them has a life or is permanent, and all are deleted."""
    keys = Keys(queue_name)
    yield keys
    with connect_sync(redis_url) as client:
        leaked = immortal(client, keys)
        for key in client.scan_iter(match=f"{keys.base}*", count=1000):
            client.delete(key)
    assert not leaked, f"keys that never expire: {leaked}"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


def immortal(client: redis_sync.Redis, keys: Keys) -> list[str]:
    """Keys of a queue without a TTL that are not on the permanent list."""
    names = [key.decode() for key in client.scan_iter(match=f"{keys.base}*", count=1000)]
    temporary = [name for name in names if not name.removeprefix(keys.base).startswith(PERMANENT)]
    return sorted(name for name in temporary if client.ttl(name) == -1)


def leftovers(client: redis_sync.Redis, keys: Keys, shards: int = 1) -> list[str]:
    """What a queue must not hold once all jobs have ended and all workers have left: entries, pendings, consumers."""
    found: list[str] = []
    for stream in keys.streams(shards):
        found += [f"{stream}: {client.xlen(stream)} entries"] if client.xlen(stream) else []
        for consumer in client.xinfo_consumers(stream, GROUP):
            if consumer["name"] != RELEASED or consumer["pending"]:
                found.append(f"{stream}: consumer {consumer['name'].decode()} with {consumer['pending']} pending")
    return found + [f"worker {name.decode()}" for name in client.zrange(keys.workers, 0, -1)]


@pytest.fixture
def bench(redis: Redis, keys: Keys) -> QueueBench:
    return QueueBench(redis, keys)
