"""The asyncio client against real servers, with the worker's side written by hand."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import redis

from gllm.client import Client, QueueFull
from gllm.connection import connect_sync
from gllm.keys import Keys, shard_of
from gllm.protocol import TERMINAL_ENTRY_ID, InvalidJob, Job, Tokens
from gllm.reply import Hole, JobFailed, Reply, ReplyExpired, Rewound
from tests.gllm.scribe import Scribe
from tests.servers import Server, binaries


@pytest.fixture
async def client(redis_url: str, keys: Keys) -> AsyncIterator[Client]:
    async with Client(redis_url, keys.queue) as client:
        yield client


async def until(condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} seconds: {what}"
        await asyncio.sleep(0.005)


async def collect(client: Client, job_id: str, last_id: str = "0-0", **more) -> list[Reply]:
    async with asyncio.timeout(20):
        return [reply async for reply in client.stream(job_id, last_id, **more)]


def joined(replies: list[Reply]) -> str:
    return "".join(reply.text for reply in replies)


@asynccontextmanager
async def reading(client: Client, job_id: str) -> AsyncIterator[tuple[list[Reply], asyncio.Task[None]]]:
    """A reader that runs beside the test; what it has read so far, and its task."""
    replies: list[Reply] = []

    async def read() -> None:
        async for reply in client.stream(job_id):
            replies.append(reply)

    task = asyncio.create_task(read())
    try:
        yield replies, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def blocked_readers(raw: redis.Redis) -> list[dict[str, str]]:
    return [row for row in raw.client_list() if row["cmd"] == "xread" and "b" in row["flags"]]


def kill_readers(raw: redis.Redis) -> None:
    for row in blocked_readers(raw):
        raw.client_kill_filter(_id=row["id"])


# --- submit ---


async def test_client_submit_writes_the_entry_of_the_protocol(client: Client, raw: redis.Redis, keys: Keys) -> None:
    job_id = await client.submit(
        prompt="Hi",
        max_tokens=3,
        id="j:1",
        priority="high",
        deadline=2_000_000_000_000,
        not_before=1_900_000_000_000,
        affinity="chat",
        tenant="ann",
        traceparent="00-1-2-01",
    )
    [(_, fields)] = raw.xrange(keys.jobs("high", 0))
    assert job_id == "j:1"
    assert json.loads(fields.pop(b"body")) == {"prompt": "Hi", "max_tokens": 3}
    assert fields == {
        b"id": b"j:1",
        b"deadline": b"2000000000000",
        b"not_before": b"1900000000000",
        b"affinity": b"chat",
        b"tenant": b"ann",
        b"traceparent": b"00-1-2-01",
        b"v": b"1",
    }


async def test_client_submit_makes_an_id_of_its_own_each_time(client: Client, raw: redis.Redis, keys: Keys) -> None:
    ids = {await client.submit(prompt="x") for _ in range(20)}
    assert len(ids) == 20
    assert {fields[b"id"].decode() for _, fields in raw.xrange(keys.jobs("normal", 0))} == ids


async def test_client_submit_takes_a_whole_job(client: Client, raw: redis.Redis, keys: Keys) -> None:
    await client.submit(Job(messages=[{"role": "user", "content": "é"}], stop=["a"]))
    [(_, fields)] = raw.xrange(keys.jobs("normal", 0))
    assert msgspec.json.decode(fields[b"body"]) == {"messages": [{"role": "user", "content": "é"}], "stop": ["a"]}


async def test_client_submit_shards_by_affinity_else_by_id(client: Client, raw: redis.Redis, keys: Keys) -> None:
    raw.hset(keys.meta, "shards", 4)
    for number in range(8):
        await client.submit(prompt="x", id=f"job{number}")
        await client.submit(prompt="x", id=f"kin{number}", affinity="family")
    for shard in range(4):
        for _, fields in raw.xrange(keys.jobs("normal", shard)):
            assert shard_of((fields.get(b"affinity") or fields[b"id"]).decode(), 4) == shard
    assert sum(raw.xlen(keys.jobs("normal", shard)) for shard in range(4)) == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "x", "top_p": 0}, "top_p: .*got 0"),
        ({"prompt": "x", "speed": 9}, "speed: unknown field, got 9"),
        ({}, "exactly one expected, got none"),
        ({"prompt": "x", "id": "a b"}, 'id: .*got "a b"'),
        ({"prompt": "x", "id": ""}, 'id: .*got ""'),
        ({"prompt": "x", "id": "é"}, "id: "),
        ({"prompt": "x", "id": 5}, "id: .*got 5"),
        ({"prompt": "x", "tenant": 5}, "tenant: .*got 5"),
        ({"prompt": "x", "priority": "urgent"}, 'priority: one of high, normal, low expected, got "urgent"'),
        ({"prompt": "x", "affinity": ""}, 'affinity: .*got ""'),
        ({"prompt": "x", "tenant": "a\nb"}, "tenant: "),
        ({"prompt": "x", "deadline": 1.5}, "deadline: .*got 1.5"),
        ({"prompt": "x", "deadline": datetime(2030, 1, 1)}, "deadline: .*aware"),  # noqa: DTZ001
        ({"prompt": "x", "not_before": True}, "not_before: "),
        ({"prompt": "x\ud800"}, "body: "),
        ({"prompt": "x" * (4 * 1024 * 1024)}, "body: at most 4194304 bytes"),
    ],
)
async def test_client_submit_refuses_by_name_and_writes_nothing(
    client: Client, raw: redis.Redis, keys: Keys, fields: dict, message: str
) -> None:
    with pytest.raises(InvalidJob, match=message):
        await client.submit(**fields)
    assert raw.keys(keys.base + "*") == []


async def test_client_submit_refuses_a_job_beside_fields(client: Client) -> None:
    with pytest.raises(InvalidJob, match="top_k: give a Job or its fields"):
        await client.submit(Job(prompt="x"), top_k=3)


async def test_client_submit_refuses_a_bare_prompt(client: Client) -> None:
    with pytest.raises(InvalidJob, match='a Job or fields like prompt=… expected, got "Hello"'):
        await client.submit("Hello")  # type: ignore[arg-type]


async def test_client_submit_checks_a_job_built_by_hand(client: Client) -> None:
    with pytest.raises(InvalidJob, match="top_p"):
        await client.submit(Job(prompt="x", top_p=7.0))


async def test_client_submit_counts_times_on_redis_clock(client: Client, raw: redis.Redis, keys: Keys) -> None:
    moment = datetime(2033, 5, 18, tzinfo=UTC)
    await client.submit(prompt="x", deadline=timedelta(seconds=30), not_before=moment)
    [(_, fields)] = raw.xrange(keys.jobs("normal", 0))
    seconds, _ = raw.time()
    assert abs(int(fields[b"deadline"]) - 1000 * (seconds + 30)) < 5000
    assert int(fields[b"not_before"]) == int(moment.timestamp() * 1000)


async def test_client_submit_refuses_a_full_queue(redis_url: str, raw: redis.Redis, keys: Keys) -> None:
    async with Client(redis_url, keys.queue, max_queue=2) as client:
        await client.submit(prompt="x", priority="low")
        raw.zadd(keys.delayed, {"later": 4_000_000_000_000})
        with pytest.raises(QueueFull, match="2 unfinished jobs, max_queue is 2"):
            await client.submit(prompt="x")
    assert raw.xlen(keys.jobs("normal", 0)) == 0


async def test_client_submit_outlives_a_killed_connection(client: Client, raw: redis.Redis, keys: Keys) -> None:
    await client.submit(prompt="x", id="before")
    for row in raw.client_list():
        if row["name"] == "gllm-client":
            raw.client_kill_filter(_id=row["id"])
    await client.submit(prompt="x", id="after")
    assert {fields[b"id"] for _, fields in raw.xrange(keys.jobs("normal", 0))} == {b"before", b"after"}


async def test_client_gives_up_on_an_absent_server_when_its_patience_is_over() -> None:
    started = time.monotonic()
    async with Client("redis://127.0.0.1:1/0", patience=0.3) as client:
        with pytest.raises(redis.ConnectionError):
            await client.submit(prompt="x")
        with pytest.raises(redis.ConnectionError):
            await collect(client, "job1")
    assert 0.5 < time.monotonic() - started < 10


def test_client_refuses_a_queue_name_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"queue: .*got 'a b'"):
        Client("redis://localhost/0", "a b")


# --- stream ---


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


# --- result and cancel ---


async def test_client_result_is_the_whole_reply(client: Client, scribe: Scribe) -> None:
    scribe.hello()
    result = await client.result(scribe.id)
    assert (result.id, result.text, result.ids, result.finish_reason) == (scribe.id, "Hello world", [1, 2, 3], "stop")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 3)


async def test_client_result_raises_the_jobs_error(client: Client, scribe: Scribe) -> None:
    scribe.error("too_large", "prompt: 9000 tokens, the model takes 8192")
    with pytest.raises(JobFailed, match="9000 tokens") as caught:
        await client.result(scribe.id)
    assert (caught.value.code, caught.value.retryable) == ("too_large", False)


async def test_client_result_waits_no_longer_than_told(client: Client, scribe: Scribe) -> None:
    scribe.start()
    with pytest.raises(TimeoutError):
        await client.result(scribe.id, timeout=0.2)


async def test_client_that_timed_out_can_go_on_reading(client: Client, scribe: Scribe) -> None:
    """A cancelled read must not leave its answer in the connection for the next one."""
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await client.result(scribe.id, timeout=0.05)
    scribe.hello()
    assert (await client.result(scribe.id)).text == "Hello world"


async def test_client_cancel_sets_a_wish_that_expires(client: Client, scribe: Scribe) -> None:
    scribe.start()
    assert await client.cancel(scribe.id) is True
    assert 86_000 < scribe.raw.ttl(scribe.keys.cancel(scribe.id)) <= 86_400


async def test_client_cancel_works_before_any_claim(client: Client, scribe: Scribe) -> None:
    await client.submit(prompt="x", id=scribe.id)
    assert await client.cancel(scribe.id) is True
    assert scribe.raw.get(scribe.keys.cancel(scribe.id)) == b"1"


async def test_client_cancel_of_a_delayed_job_outlives_its_wait(client: Client, scribe: Scribe) -> None:
    """A wish that is forgotten before the job's time has come would let it run."""
    due = 1000 * (int(time.time()) + 48 * 3600)
    scribe.raw.zadd(scribe.keys.delayed, {scribe.id: due})
    scribe.raw.hset(scribe.keys.job(scribe.id), "state", "delayed")
    scribe.raw.expire(scribe.keys.job(scribe.id), 60)
    assert await client.cancel(scribe.id) is True
    assert scribe.raw.pexpiretime(scribe.keys.cancel(scribe.id)) == due + 86_400_000


async def test_client_cancel_leaves_nothing_behind_for_an_ended_job(client: Client, scribe: Scribe) -> None:
    scribe.hello()
    assert await client.cancel(scribe.id) is False
    assert not scribe.raw.exists(scribe.keys.cancel(scribe.id))


async def test_client_tokens_of_a_stream_are_typed_events(client: Client, scribe: Scribe) -> None:
    scribe.hello()
    events = [reply.event for reply in await collect(client, scribe.id)]
    assert [event.ids for event in events if isinstance(event, Tokens)] == [[1], [2, 3]]
