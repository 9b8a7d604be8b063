"""The client when Redis refuses, is replaced, loses an answer or has fewer copies than asked for: healed, or said."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
import redis

from gllm.client import Client, NotReplicated
from gllm.connection import connect_sync
from gllm.keys import Keys
from gllm.reply import Rewound
from tests.gllm.scribe import Scribe
from tests.proxy import Proxy
from tests.redis_kinds import Sentinels, until
from tests.servers import Server, binaries

NOWHERE = ("127.0.0.1", 1)


@pytest.fixture
async def proxy(own_server: Server) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", own_server.port) as proxy:
        yield proxy


async def refused_for_a_while(server: Server, queue: str, begin: Callable, end: Callable) -> redis.Redis:
    """A submit and a cancel that begin while Redis refuses writes, and end once it does not."""
    raw = connect_sync(server.url)
    async with Client(server.url, queue) as client:
        assert await client.cancel("warm")  # the connections are there
        begin(raw)
        calls: list[Awaitable[object]] = [client.submit(prompt="x", id="one"), client.cancel("one")]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.15)  # some tries meet the refusal
        assert not any(task.done() for task in tasks), [task.result() for task in tasks if task.done()]
        end(raw)
        async with asyncio.timeout(10):
            assert await asyncio.gather(*tasks) == ["one", True]
    return raw


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("CONFIG", "SET", "min-replicas-to-write", "1"), ("CONFIG", "SET", "min-replicas-to-write", "0")),
        (("REPLICAOF", *map(str, NOWHERE)), ("REPLICAOF", "NO", "ONE")),
    ],
    ids=["full", "too few replicas", "read-only"],
)
async def test_client_bears_with_a_redis_that_refuses_writes(
    own_server: Server, queue_name: str, begin: tuple[str, ...], end: tuple[str, ...]
) -> None:
    raw = await refused_for_a_while(
        own_server, queue_name, lambda raw: raw.execute_command(*begin), lambda raw: raw.execute_command(*end)
    )
    with raw:
        keys = Keys(queue_name)
        assert [fields[b"id"] for _, fields in raw.xrange(keys.jobs("normal", 0))] == [b"one"]
        assert raw.get(keys.cancel("one")) == b"1"


async def test_client_bears_with_a_redis_that_is_loading(proxy: Proxy, queue_name: str) -> None:
    proxy.loading = True
    async with Client(proxy.url, queue_name) as client:
        submitting = asyncio.create_task(client.submit(prompt="x"))
        await asyncio.sleep(0.15)
        assert not submitting.done()
        proxy.loading = False
        async with asyncio.timeout(10):
            await submitting


async def test_client_leaves_a_primary_that_was_demoted_for_what_its_name_leads_to(
    proxy: Proxy, own_server: Server, server_kind: str, tmp_path: Path, queue_name: str
) -> None:
    """A managed Redis fails over by name: the old primary lives on and would answer READONLY for ever."""
    (tmp_path / "new").mkdir()
    new = Server(binaries()[server_kind], tmp_path / "new")
    new.start()
    try:
        plain = connect_sync(proxy.url)
        async with Client(proxy.url, queue_name) as client:
            await client.submit(prompt="x", id="before")
            await asyncio.to_thread(plain.set, "a", 1)
            proxy.target = "127.0.0.1", new.port
            with connect_sync(own_server.url) as old:
                old.replicaof(*NOWHERE)
            async with asyncio.timeout(10):
                await client.submit(prompt="x", id="after")
        with pytest.raises(redis.ReadOnlyError):
            await asyncio.to_thread(plain.set, "a", 2)
        assert await asyncio.to_thread(plain.set, "a", 3)
        plain.close()
        with connect_sync(new.url) as raw:
            assert [fields[b"id"] for _, fields in raw.xrange(Keys(queue_name).jobs("normal", 0))] == [b"after"]
    finally:
        new.stop(kill=True)


async def test_client_whose_answer_was_lost_does_not_take_its_own_entry_for_a_full_queue(
    proxy: Proxy, own_server: Server, queue_name: str
) -> None:
    async with Client(proxy.url, queue_name, max_queue=1) as client:
        proxy.lose = b"XADD"
        assert await client.submit(prompt="x", id="one") == "one"
    assert proxy.cuts == 1
    with connect_sync(own_server.url) as raw:
        assert raw.xlen(Keys(queue_name).jobs("normal", 0)) == 2  # the claim takes the id once


async def test_client_compares_what_it_has_read_when_its_connection_broke_between_two_reads(
    redis_url: str, keys: Keys, scribe: Scribe
) -> None:
    """A slow reader is away from Redis while a failover puts another reply in its place."""
    scribe.start()
    older = scribe.raw.dump(scribe.out)
    scribe.tokens(0, 0, [1, 2], "ab")
    async with Client(redis_url, keys.queue) as client, aclosing(client.stream(scribe.id)) as stream:
        assert [(await anext(stream)).text for _ in range(2)] == ["", "ab"]
        scribe.restore(older)
        scribe.tokens(0, 0, [1, 9], "az")
        scribe.tokens(2, 2, [3], "c")
        for row in scribe.raw.client_list():
            if row["name"] == "gllm-reader":
                scribe.raw.client_kill_filter(_id=row["id"])
        with pytest.raises(Rewound, match="token 1 was 2 and is now 9"):
            async with asyncio.timeout(10):
                await anext(stream)


async def test_client_that_gives_up_reads_in_flight_never_gets_the_reply_of_another(
    proxy: Proxy, own_server: Server, queue_name: str
) -> None:
    """A cancelled command leaves its answer in the connection; who takes that connection next must not read it."""
    jobs = {f"job{number}": f"text of {number}" for number in range(30)}
    with connect_sync(own_server.url) as raw:
        for job_id, text in jobs.items():
            scribe = Scribe(raw, Keys(queue_name), job_id)
            scribe.tokens(0, 0, [1], text)
            scribe.done(1)
    proxy.delay, rng = 0.005, random.Random(1)

    async def read(client: Client, job_id: str) -> str:
        for _ in range(5):
            with suppress(TimeoutError):
                await client.result(job_id, timeout=rng.uniform(0.0, 0.1))
        return (await client.result(job_id)).text

    async with Client(proxy.url, queue_name) as client, asyncio.timeout(20):
        texts = await asyncio.gather(*(read(client, job_id) for job_id in jobs))
    assert dict(zip(jobs, texts, strict=True)) == jobs


async def test_client_stream_keeps_its_timeout_while_redis_is_away(queue_name: str) -> None:
    async with Client("redis://127.0.0.1:1/0", queue_name) as client, asyncio.timeout(5):
        with pytest.raises(TimeoutError, match=r"no event of the reply for 0\.2 seconds"):
            async for _ in client.stream("job1", timeout=0.2):
                pass


async def test_client_waits_for_replicas_and_says_how_many_have_the_job(
    server_kind: str, tmp_path: Path, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Sentinels(binaries()[server_kind], tmp_path)
    stream = Keys(queue_name).jobs("normal", 0)
    try:
        pair.one.start()
        pair.two.start()
        until(lambda: pair.replicas(pair.one) == 1, "the replica to be in step")
        async with Client(pair.one.url, queue_name) as client:
            await client.submit(prompt="x", wait_replicas=1)
            with connect_sync(pair.two.url) as replica:
                assert replica.xlen(stream) == 1
            monkeypatch.setattr("gllm.client.REPLICAS_SECONDS", 0.1)
            pair.two.stop(kill=True)
            with pytest.raises(NotReplicated, match=r"job mine is submitted, but 0 of 2 replicas .* is safe") as caught:
                await client.submit(prompt="x", id="mine", wait_replicas=2)
            assert (caught.value.id, caught.value.acknowledged) == ("mine", 0)
            assert await client.submit(prompt="x", id="mine") == "mine"
        with connect_sync(pair.one.url) as primary:
            ids = [fields[b"id"] for _, fields in primary.xrange(stream)]
            assert ids[1:] == [b"mine"] * 2
    finally:
        pair.stop()
