"""`Client.stream` when connections, entries or whole replies are lost: healed, or said by name."""

import asyncio
import time
from pathlib import Path

import pytest

from gllm.client import Client
from gllm.connection import connect_sync
from gllm.keys import Keys
from gllm.reply import Hole, ReplyExpired, Rewound
from tests.gllm.readers import blocked_readers, collect, joined, kill_readers, reading, until
from tests.gllm.scribe import Scribe
from tests.servers import Server, binaries


async def test_client_does_not_notice_killed_connections(client: Client, scribe: Scribe) -> None:
    async with reading(client, scribe.id) as (replies, task):
        scribe.start()
        for number in range(12):
            await until(lambda n=number: len(replies) == n + 1, "the last entry is read")
            await until(lambda: blocked_readers(scribe.raw), "the reader waits")
            kill_readers(scribe.raw)
            scribe.tokens(number, number, [number], "x")
        scribe.done(12)
        await until(task.done, "the stream has ended")
        assert joined(replies) == "x" * 12
        assert [token for reply in replies for token in reply.ids] == list(range(12))


async def test_client_reads_on_after_a_restart_of_the_server(
    server_kind: str, tmp_path: Path, keys: Keys, scribe: Scribe
) -> None:
    """Redis is away for a while, and comes back with what its append-only file has."""
    server = Server(binaries()[server_kind], tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    server.start()
    try:
        with connect_sync(server.url) as raw:
            own = Scribe(raw, keys, "job1")
            own.start()
            own.tokens(0, 0, [1], "a")
            async with Client(server.url, keys.queue) as client, reading(client, "job1") as (replies, task):
                await until(lambda: joined(replies) == "a", "the first token is read")
                server.stop(kill=True)
                submitting = asyncio.create_task(client.submit(prompt="x", id="meanwhile"))
                await asyncio.sleep(0.3)  # long enough for both calls to meet the absence
                assert not task.done()
                assert not submitting.done()
                server.start()
                own.tokens(1, 1, [2], "b")
                own.done(2)
                await until(task.done, "the stream has ended")
                assert joined(replies) == "ab"
                assert await submitting == "meanwhile"
            assert raw.xlen(keys.jobs("normal", 0)) == 1
    finally:
        server.stop(kill=True)


async def test_client_reads_on_in_an_older_copy_after_a_failover(client: Client, scribe: Scribe) -> None:
    """The stream is put back to its second token; the worker repairs from there in other entries."""
    scribe.start()
    scribe.tokens(0, 0, [1, 2], "ab")
    older = scribe.raw.dump(scribe.out)
    scribe.tokens(2, 2, [3, 4], "cd")
    async with reading(client, scribe.id) as (replies, task):
        await until(lambda: joined(replies) == "abcd", "everything is read")
        scribe.restore(older)
        kill_readers(scribe.raw)
        scribe.resume(2, 7)
        scribe.tokens(2, 2, [3], "c")
        scribe.tokens(3, 3, [4, 5], "de")
        scribe.done(5)
        await until(task.done, "the stream has ended")
        assert joined(replies) == "abcde"


async def test_client_raises_rewound_when_the_failover_lost_what_it_read(client: Client, scribe: Scribe) -> None:
    scribe.start()
    older = scribe.raw.dump(scribe.out)
    scribe.tokens(0, 0, [1, 2], "ab")
    async with reading(client, scribe.id) as (replies, task):
        await until(lambda: joined(replies) == "ab", "everything is read")
        scribe.restore(older)
        scribe.tokens(0, 0, [1, 9], "az")
        await until(lambda: blocked_readers(scribe.raw), "the reader waits")  # else there is nobody to kill
        kill_readers(scribe.raw)
        await until(task.done, "the stream has ended")
        with pytest.raises(Rewound, match="token 1 was 2 and is now 9"):
            task.result()


async def test_client_raises_hole_when_entries_are_missing(client: Client, scribe: Scribe) -> None:
    scribe.start()
    scribe.tokens(4, 4, [5], "e")
    with pytest.raises(Hole, match="tokens 0 to 4"):
        await collect(client, scribe.id)


async def test_client_resumed_by_entry_alone_reads_a_shortened_stream(client: Client, scribe: Scribe) -> None:
    scribe.tokens(0, 0, [1, 2], "ab")
    scribe.tokens(2, 2, [3], "c")
    scribe.done(3)
    scribe.raw.xdel(scribe.out, "2-0")
    assert joined(await collect(client, scribe.id, "2-0")) == "c"


async def test_client_raises_reply_expired_at_once(client: Client, scribe: Scribe) -> None:
    scribe.state("ended")
    started = time.monotonic()
    with pytest.raises(ReplyExpired, match="job job1 has ended"):
        await collect(client, scribe.id)
    assert time.monotonic() - started < 1.5


async def test_client_raises_reply_expired_when_the_reply_goes_while_it_waits(client: Client, scribe: Scribe) -> None:
    scribe.start()
    async with reading(client, scribe.id) as (replies, task):
        await until(lambda: replies, "the start is read")
        scribe.state("ended")
        scribe.raw.delete(scribe.out)
        await until(task.done, "the stream has ended")
        with pytest.raises(ReplyExpired):
            task.result()
