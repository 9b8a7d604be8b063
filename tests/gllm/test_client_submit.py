"""What `Client.submit` writes, refuses and outlives, against real servers."""

import json
import time
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import redis

from gllm.client import Client, QueueFull
from gllm.keys import Keys, shard_of
from gllm.protocol import InvalidJob, Job
from tests.gllm.readers import collect


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
