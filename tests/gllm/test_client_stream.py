"""`Client.stream` against real servers, with the worker's side written by hand."""

import asyncio
from contextlib import aclosing

import pytest
import redis

from gllm.client import Client
from gllm.keys import Keys
from gllm.protocol import TERMINAL_ENTRY_ID, InvalidJob
from tests.gllm.readers import blocked_readers, collect, joined, reading, until
from tests.gllm.scribe import Scribe


async def test_client_streams_a_finished_reply(client: Client, scribe: Scribe) -> None:
    scribe.hello()
    replies = await collect(client, scribe.id)
    assert joined(replies) == "Hello world"
    assert [reply.entry for reply in replies] == ["0-1", "1-0", "3-0", TERMINAL_ENTRY_ID]


async def test_client_streams_live_while_it_is_written(client: Client, scribe: Scribe) -> None:
    async with reading(client, scribe.id) as (replies, task):
        await until(lambda: blocked_readers(scribe.raw), "the reader waits")
        scribe.start()
        await until(lambda: len(replies) == 1, "the start is read")
        scribe.tokens(0, 0, [1], "a")
        await until(lambda: len(replies) == 2, "the first token is read")
        scribe.done(1)
        await until(task.done, "the stream has ended")
        assert joined(replies) == "a"


async def test_client_resumes_behind_the_last_entry(client: Client, scribe: Scribe) -> None:
    scribe.start()
    scribe.tokens(0, 0, [1, 2], "ab")
    async with aclosing(client.stream(scribe.id)) as stream:
        read = [await anext(stream), await anext(stream)]
    scribe.tokens(2, 2, [3], "c")
    scribe.resume(3, 2)
    scribe.done(3, "d")
    rest = await collect(client, scribe.id, read[-1].entry)
    assert joined(read) + joined(rest) == "abcd"
    assert [reply.entry for reply in rest] == ["3-0", "3-2", TERMINAL_ENTRY_ID]


async def test_client_that_has_read_the_end_reads_nothing_more(client: Client, scribe: Scribe) -> None:
    scribe.hello()
    assert await collect(client, scribe.id, TERMINAL_ENTRY_ID) == []


async def test_client_waits_for_a_job_that_no_worker_has_taken(client: Client, scribe: Scribe) -> None:
    await client.submit(prompt="x", id=scribe.id)
    with pytest.raises(TimeoutError, match=r"no event of the reply for 0\.2 seconds"):
        await collect(client, scribe.id, timeout=0.2)


async def test_client_stream_timeout_counts_silence_not_length(client: Client, scribe: Scribe) -> None:
    async def write() -> None:
        for number in range(6):
            await asyncio.sleep(0.2)
            scribe.tokens(number, number, [number], "x")
        scribe.done(6)

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        assert joined(await collect(client, scribe.id, timeout=1.0)) == "x" * 6


async def test_client_reads_a_long_reply_in_pieces(client: Client, scribe: Scribe) -> None:
    for number in range(700):
        scribe.tokens(number, number, [number], "x")
    scribe.done(700)
    assert joined(await collect(client, scribe.id)) == "x" * 700


async def test_client_reads_more_streams_at_once_than_a_default_pool_has_connections(
    client: Client, raw: redis.Redis, keys: Keys
) -> None:
    ids = [f"job{number}" for number in range(150)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collect(client, job_id)) for job_id in ids]
        await until(lambda: len(blocked_readers(raw)) >= 150, "all readers wait")
        for job_id in ids:
            Scribe(raw, keys, job_id).hello()
    assert {joined(task.result()) for task in tasks} == {"Hello world"}


async def test_client_two_producers_of_one_id_read_the_same_reply(client: Client, scribe: Scribe) -> None:
    ids = [await client.submit(prompt="x", id=scribe.id) for _ in range(2)]
    scribe.hello()
    assert ids == [scribe.id] * 2
    assert [joined(await collect(client, job_id)) for job_id in ids] == ["Hello world"] * 2


async def test_client_stream_refuses_what_is_no_id(client: Client) -> None:
    with pytest.raises(InvalidJob, match="id: "):
        await collect(client, "no id")
    with pytest.raises(ValueError, match="last_id: "):
        await collect(client, "job1", "yesterday")
