"""A worker and a client on Redis as it is run: behind a sentinel, in a cluster, demoted, with TLS and users."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from gllm.client import Client
from gllm.connection import connect, connect_sync
from gllm.keys import Keys
from gllm.reply import Result
from tests.redis_kinds import SERVICE, Cluster, Sentinels, TlsServer, certify, speaks_tls, until
from tests.servers import Server, binaries
from tests.worker.fake_engine import FakeEngine, script, text_of
from tests.worker.queue_bench import QueueBench
from tests.worker.service_bench import ServiceBench, Worker
from worker import logs
from worker.service import OK, REFUSED

HELLO = [3 + byte for byte in b"hello"]
TOKENS = 300


@asynccontextmanager
async def crew_at(url: str, queue: str) -> AsyncIterator[ServiceBench]:
    redis = connect(url, queue=queue)
    crew = ServiceBench(QueueBench(redis, Keys(queue)), url)
    try:
        yield crew
    finally:
        await crew.close()
        await redis.aclose()


@pytest.fixture
def sentinels(server_kind: str, tmp_path: Path) -> Iterator[Sentinels]:
    """Not started yet."""
    sentinels = Sentinels(binaries()[server_kind], tmp_path)
    yield sentinels
    sentinels.stop()


@pytest.fixture
def cluster(server_kind: str, tmp_path: Path, queue_name: str) -> Iterator[Cluster]:
    """Not started yet."""
    cluster = Cluster(binaries()[server_kind], tmp_path, queue_name)
    yield cluster
    cluster.stop()


@pytest.fixture
def tls_server(server_kind: str, tmp_path: Path) -> Iterator[TlsServer]:
    if not speaks_tls(binaries()[server_kind]):
        pytest.skip(f"{server_kind} was built without TLS")
    server = TlsServer(binaries()[server_kind], tmp_path)
    server.start()
    yield server
    server.stop(kill=True)


@pytest.fixture
def log_lines() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def waits_for_redis(log_lines: list[structlog.typing.EventDict]) -> bool:
    return any(line["event"] == logs.REDIS_WAITING for line in log_lines)


def refusal(log_lines: list[structlog.typing.EventDict]) -> str:
    (line,) = [line for line in log_lines if line["log_level"] == "error"]
    assert line["event"] == logs.REDIS_REFUSED
    return line["message"]


class Reader:
    """Reads a reply beside the test."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.ids: list[int] = []
        self._client, self._id = client, job_id
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> Result:
        async for reply in self._client.stream(self._id):
            self.ids += reply.ids
        return await self._client.result(self._id)


async def long_job(crew: ServiceBench, client: Client, **options: int) -> Reader:
    """A job of some seconds, of which the client has read a part."""
    job = await client.submit(prompt="hello", max_tokens=TOKENS, temperature=0, **options)
    reader = Reader(client, job)
    await crew.until(lambda: len(reader.ids) > 20 or reader.task.done(), "the first tokens")
    return reader


async def whole(crew: ServiceBench, worker: Worker, reader: Reader) -> None:
    """The reader gets the whole reply, and the worker is well."""
    async with asyncio.timeout(30):
        result = await reader.task
    assert reader.ids == result.ids == script(HELLO, TOKENS)
    assert result.text == text_of(result.ids)
    await crew.until(lambda: worker.ready, "readiness")


async def test_failover_behind_a_sentinel_heals_for_client_and_worker(
    sentinels: Sentinels, queue_name: str, log_lines: list[structlog.typing.EventDict]
) -> None:
    async with crew_at(sentinels.url, queue_name) as crew, Client(sentinels.url, queue_name) as client:
        worker = await crew.start(wait=False, engine=FakeEngine(step_seconds=0.003))
        await crew.until(lambda: waits_for_redis(log_lines), "the worker to wait")
        await asyncio.to_thread(sentinels.start)
        await crew.until(lambda: worker.ready, "the worker")
        reader = await long_job(crew, client, wait_replicas=1)
        plain = connect_sync(sentinels.url)
        plain.ping()

        await asyncio.to_thread(sentinels.wait_watched)
        sentinels.one.stop(kill=True)
        await crew.until(lambda: not worker.ready, "readiness to turn false")
        submitting = asyncio.create_task(client.submit(prompt="hello", max_tokens=4, temperature=0))

        await whole(crew, worker, reader)
        async with asyncio.timeout(10):
            assert (await client.result(await submitting)).ids == script(HELLO, 4)
        await asyncio.to_thread(
            until, lambda: plain.info("replication")["role"] == "master", "the plain client to heal"
        )
        plain.close()
        assert await worker.stop() == OK


async def test_cluster_takeover_and_move_of_the_slot_heal_for_client_and_worker(
    cluster: Cluster, queue_name: str, log_lines: list[structlog.typing.EventDict]
) -> None:
    async with crew_at(cluster.url, queue_name) as crew, Client(cluster.url, queue_name) as client:
        worker = await crew.start(wait=False, engine=FakeEngine(step_seconds=0.003))
        await crew.until(lambda: waits_for_redis(log_lines), "the worker to wait")
        await asyncio.to_thread(cluster.start)
        await crew.until(lambda: worker.ready, "the worker")
        reader = await long_job(crew, client, wait_replicas=1)
        plain = connect_sync(cluster.url, queue=queue_name)
        assert plain.exists(crew.bench.keys.meta)
        await asyncio.to_thread(cluster.take_over)
        await whole(crew, worker, reader)
        await asyncio.to_thread(until, lambda: plain.exists(crew.bench.keys.meta), "the plain client to heal")

        reader = await long_job(crew, client)
        cluster.begin_move()
        for key in cluster.left():
            cluster.move(key)
            await asyncio.sleep(0.03)  # a renewal, some flushes and reads meet each state in between
        assert not reader.task.done()
        await crew.until(lambda: not worker.ready, "readiness to turn false")
        assert cluster.left() == []
        cluster.end_move()
        await whole(crew, worker, reader)
        await asyncio.to_thread(until, lambda: plain.exists(crew.bench.keys.meta), "the plain client to heal again")
        plain.close()
        assert await worker.stop() == OK


async def test_read_only_redis_is_waited_for_at_the_start_and_in_the_middle_of_a_job(
    own_crew: ServiceBench, own_server: Server, queue_name: str, log_lines: list[structlog.typing.EventDict]
) -> None:
    demote, promote = ("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")
    redis = own_crew.bench.redis
    await redis.execute_command(*demote)
    worker = await own_crew.start(wait=False, engine=FakeEngine(step_seconds=0.003))
    await own_crew.until(lambda: waits_for_redis(log_lines), "the worker to wait")
    assert not worker.ready
    await redis.execute_command(*promote)
    await own_crew.until(lambda: worker.ready, "the worker")

    async with Client(own_server.url, queue_name) as client:
        reader = await long_job(own_crew, client)
        await redis.execute_command(*demote)
        await own_crew.until(lambda: not worker.ready, "readiness to turn false")
        await redis.execute_command(*promote)
        await whole(own_crew, worker, reader)


async def served(crew: ServiceBench, url: str) -> None:
    """A worker and a client do a job by way of this URL."""
    worker = await crew.start(redis=url)
    async with Client(url, crew.bench.keys.queue) as client, asyncio.timeout(10):
        job = await client.submit(prompt="hello", max_tokens=4, temperature=0)
        assert (await client.result(job)).ids == script(HELLO, 4)
    assert await worker.stop() == OK


async def test_tls_serves_and_a_certificate_of_another_authority_ends_the_worker(
    tls_server: TlsServer, tmp_path: Path, queue_name: str, log_lines: list[structlog.typing.EventDict]
) -> None:
    async with crew_at(tls_server.url, queue_name) as crew:
        await served(crew, tls_server.url)
        (tmp_path / "other").mkdir()
        certify(tmp_path / "other")
        other = tls_server.url.replace(str(tls_server.ca), str(tmp_path / "other" / "ca.pem"))

        worker = await crew.start(wait=False, redis=other)
        assert await worker.task == REFUSED
        assert "certificate verify failed" in refusal(log_lines)
        assert "\n" not in refusal(log_lines)


@pytest.mark.parametrize("query", ["", "?ssl_cert_reqs=none"], ids=["unknown authority", "no certificate of ours"])
async def test_tls_that_one_side_refuses_ends_the_worker(
    tls_server: TlsServer, queue_name: str, log_lines: list[structlog.typing.EventDict], query: str
) -> None:
    async with crew_at(tls_server.url, queue_name) as crew:
        worker = await crew.start(wait=False, redis=tls_server.url.partition("?")[0] + query)
        assert await worker.task == REFUSED
        assert "certificate" in refusal(log_lines)


async def test_user_with_an_awkward_password_is_served_over_a_socket_file(
    server_kind: str, tmp_path: Path, queue_name: str
) -> None:
    path = tmp_path / "redis.sock"
    user = ("--user", "ann", "on", ">p@ss/w?r:d", f"~gllm:{{{queue_name}}}:*", "+@all")
    server = Server(binaries()[server_kind], tmp_path, "--unixsocket", str(path), "--save", "", *user)
    server.start()
    try:
        async with crew_at(server.url, queue_name) as crew:
            await served(crew, f"unix://ann:p%40ss%2Fw%3Fr%3Ad@{path}")
            await served(crew, server.url.replace("://", "://ann:p%40ss%2Fw%3Fr%3Ad@"))
    finally:
        server.stop(kill=True)


async def test_users_of_sentinel_and_server_are_different_ones(
    server_kind: str, tmp_path: Path, queue_name: str, log_lines: list[structlog.typing.EventDict]
) -> None:
    settings = f"requirepass watch\nsentinel auth-user {SERVICE} ann\nsentinel auth-pass {SERVICE} data"
    user = ("--user", "ann", "on", ">data", "~*", "&*", "+@all")
    sentinels = Sentinels(binaries()[server_kind], tmp_path, *user, sentinel=settings)
    sentinels.one.start()
    sentinels.start_watch()
    try:
        right = sentinels.url.replace("://", "://ann:data@") + "/1?sentinel_password=watch"
        async with crew_at(right, queue_name) as crew:
            await served(crew, right)
            worker = await crew.start(wait=False, redis=right.replace("password=watch", "password=wrong"))
            assert await worker.task == REFUSED
            assert "wrong" not in str(log_lines)
            assert "?sentinel_password=***" in refusal(log_lines)
    finally:
        sentinels.stop()


async def test_cluster_url_of_a_server_that_is_none_ends_the_worker(
    own_crew: ServiceBench, own_server: Server, log_lines: list[structlog.typing.EventDict]
) -> None:
    worker = await own_crew.start(wait=False, redis=own_server.url.replace("redis://", "redis+cluster://"))
    assert await worker.task == REFUSED
    assert "cluster support disabled" in refusal(log_lines)
