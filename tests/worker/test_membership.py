"""Joining and leaving a queue: its meta, its groups, and what is left in them of workers that were killed."""

import pytest

from gllm.keys import GROUP
from tests.worker.queue_bench import QueueBench, finish, now_ms, until
from worker.queue import Queue, QueueMismatch

LEASE = 0.05


async def consumers(bench: QueueBench, priority: str = "normal") -> set[str]:
    found = await bench.redis.xinfo_consumers(bench.keys.jobs(priority, 0), GROUP)
    return {consumer["name"].decode() for consumer in found}


async def test_second_worker_finds_the_meta_of_the_first(bench: QueueBench) -> None:
    await bench.redis.hset(bench.keys.meta, "shards", 2)
    await bench.worker("first")
    meta = await bench.redis.hgetall(bench.keys.meta)

    second = await bench.worker("second")

    assert await bench.redis.hgetall(bench.keys.meta) == meta
    assert meta == {b"version": b"1", b"shards": b"2", b"model": b"digest"}
    assert second.shards == 2
    await bench.redis.xadd(bench.keys.jobs("low", 1), {"id": "a", "body": "{}"})
    assert [job.id for job in await bench.claimed(second)] == ["a"]


@pytest.mark.parametrize(("field", "value"), [("model", "other"), ("version", "2")])
async def test_worker_that_does_not_fit_changes_nothing(bench: QueueBench, field: str, value: str) -> None:
    await bench.redis.hset(bench.keys.meta, mapping={"version": 1, "shards": 1, "model": "digest"} | {field: value})
    stranger = Queue(bench.redis, bench.keys, "stranger", lease=1)

    with pytest.raises(QueueMismatch, match=f"'{value}'"):
        await stranger.join("digest")

    assert await bench.redis.hget(bench.keys.meta, field) == value.encode()
    assert not await bench.redis.exists(*bench.keys.streams(1))


@pytest.mark.parametrize("shards", ["0", "x", "-1", "1e9", "257", "1000000000", "٣", b"\xff"])
async def test_count_of_shards_that_is_none_is_refused_before_a_stream_is_made(
    bench: QueueBench, shards: str | bytes
) -> None:
    """A large one would keep the server making streams, and none at all would leave a worker ready and without work."""
    await bench.redis.hset(bench.keys.meta, "shards", shards)

    with pytest.raises(QueueMismatch, match="shards: set the field shards of"):
        await Queue(bench.redis, bench.keys, "w", lease=1).join("digest")

    assert [key async for key in bench.redis.scan_iter(match=f"{bench.keys.base}jobs:*")] == []


async def test_joining_again_makes_the_groups_of_every_shard_that_are_missing(bench: QueueBench) -> None:
    await bench.redis.hset(bench.keys.meta, "shards", 2)
    worker = await bench.worker()
    await bench.redis.xgroup_destroy(bench.keys.jobs("low", 1), GROUP)

    assert await worker.join("digest") == 1
    assert await worker.join("digest") == 0


async def test_reaper_takes_only_who_is_silent_idle_and_holds_nothing(bench: QueueBench) -> None:
    stream = bench.keys.jobs("normal", 0)
    holding, beating = await bench.worker("holding", lease=LEASE), await bench.worker("beating", lease=LEASE)
    await bench.worker("empty", lease=LEASE)
    held = await bench.one(holding, "held")
    await bench.redis.xgroup_createconsumer(stream, GROUP, "empty")
    await bench.redis.xclaim(stream, GROUP, "-released", 0, [held.entry], justid=True)
    await bench.redis.xclaim(stream, GROUP, "holding", 0, [held.entry], justid=True)
    await bench.redis.xgroup_createconsumer(stream, GROUP, "beating")
    await bench.redis.xgroup_destroy(bench.keys.jobs("high", 0), GROUP)  # which keeps nobody from the other streams

    async def reaped() -> bool:
        await beating.renew([], {})
        await beating.reap()
        return await consumers(bench) == {"holding", "beating", "-released"}

    await until(reaped, "the reaper")
    assert await reaped()
    assert set(await bench.redis.zrange(bench.keys.workers, 0, -1)) == {b"beating"}


async def test_reaper_waits_for_ten_leases_of_idleness_when_the_heartbeat_is_lost(bench: QueueBench) -> None:
    worker = await bench.worker(lease=60)
    await bench.redis.xgroup_createconsumer(bench.keys.jobs("normal", 0), GROUP, "w1")
    await bench.redis.zrem(bench.keys.workers, "w1")

    assert await worker.reap() == 0
    assert await consumers(bench) == {"w1"}


async def test_worker_that_leaves_takes_everything_of_its_own_along(bench: QueueBench) -> None:
    worker = await bench.worker()
    await finish(worker, await bench.one(worker), 0)

    assert await worker.leave() == 0

    assert await bench.redis.exists(bench.keys.worker("w1")) == 0
    assert await bench.redis.zcard(bench.keys.workers) == 0
    assert [await consumers(bench, priority) for priority in ("high", "normal", "low")] == [set()] * 3


async def test_scan_for_expired_jobs_is_not_made_at_every_claim(bench: QueueBench) -> None:
    """It walks all pending entries, so a second lies between two however short the lease."""
    dead, heir = await bench.worker("dead"), await bench.worker("heir", scan_seconds=60.0)
    await heir.claim(8, ())
    await bench.one(dead)
    await bench.die(dead)

    assert (await heir.claim(8, ())).jobs == []
    assert [Queue(bench.redis, bench.keys, "w", lease=lease)._scan_every for lease in (0.3, 16.0)] == [1.0, 2.0]
    heir.scan_soon()
    assert [job.id for job in (await heir.claim(8, ())).jobs] == ["a"]


async def test_lost_answer_is_made_up_for_though_it_takes_several_claims(
    bench: QueueBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await bench.worker(lease=60)
    await worker.claim(8, ())  # the server knows the script from now on, or the first answer would be NOSCRIPT
    for n in range(3):
        await bench.submit(f"j{n}")
    real = worker.redis.evalsha

    async def lost(*args: object) -> object:
        await real(*args)
        raise ConnectionError("the answer is lost")

    monkeypatch.setattr(worker.redis, "evalsha", lost)
    with pytest.raises(ConnectionError):
        await worker.claim(8, ())
    monkeypatch.setattr(worker.redis, "evalsha", real)

    taken: list[str] = []
    for _ in range(3):
        taken += [job.id for job in (await worker.claim(1, taken)).jobs]
    assert taken == ["j0", "j1", "j2"]


async def test_clock_of_the_server_is_read_from_claims_and_renewals(bench: QueueBench) -> None:
    worker = await bench.worker()
    fresh = Queue(bench.redis, bench.keys, "fresh", lease=1)
    assert fresh.clock.now_ms() == 0

    await fresh.renew([], {})

    assert abs(fresh.clock.now_ms() - await now_ms(bench.redis)) < 1000
    assert abs(worker.clock.now_ms() - await now_ms(bench.redis)) < 1000
