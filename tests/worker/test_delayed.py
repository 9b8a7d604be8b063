"""Delayed jobs, dead letters that get another life, the reaper, and servers that forget scripts or are full."""

import json

import pytest

from gllm.connection import connect
from tests.servers import Server
from tests.worker.queue_bench import DONE, QueueBench, finish, kinds, now_ms, publish, until
from worker import scripts
from worker.connection import classify
from worker.queue import Queue
from worker.rows import FinishRow


async def ids(bench: QueueBench, worker: Queue, want: int = 16, active: tuple[str, ...] = ()) -> list[str]:
    return [job.id for job in await bench.claimed(worker, want, active)]


async def test_delayed_job_is_parked_promoted_and_runs_once(bench: QueueBench) -> None:
    worker = await bench.worker()
    due = await now_ms(bench.redis) + 150
    await bench.submit("a", "high", not_before=due, tenant="t", body=b"\x81\xff\x00")

    assert await ids(bench, worker) == []
    assert await bench.field("a", "state") == "delayed"
    await bench.clear_streams()
    await bench.submit("a", "high")
    assert await ids(bench, worker) == []  # a duplicate of a delayed job

    (job,) = await until(lambda: bench.claimed(worker), "the promotion")
    assert await now_ms(bench.redis) >= due
    assert not [name for name in await bench.redis.hkeys(bench.keys.job("a")) if name.startswith(b"entry:")]
    assert (job.stream, job.body, job.tenant) == ("jobs:high:0", b"\x81\xff\x00", "t")
    assert await bench.redis.zcard(bench.keys.delayed) == 0
    await finish(worker, job, 0)
    await bench.clear_streams()


async def test_running_job_that_the_set_still_names_is_not_added_again(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await bench.redis.zadd(bench.keys.delayed, {"a": 1})

    assert await ids(bench, worker, active=("a",)) == []

    assert await bench.redis.xlen(bench.keys.jobs("normal", 0)) == 1
    assert (await finish(worker, job, 0)).status == "OK"
    await bench.clear_streams()


async def test_delayed_job_can_be_cancelled(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a", not_before=await now_ms(bench.redis) + 500)
    await worker.claim(8, ())
    await bench.redis.set(bench.keys.cancel("a"), 1, ex=86400)

    async def ended() -> bool:
        assert await ids(bench, worker) == []
        return await bench.field("a", "state") == "ended"

    await until(ended, "the end")
    assert await bench.redis.zcard(bench.keys.delayed) == 0


async def test_bad_delayed_member_does_not_stop_the_promotion_of_others(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a", not_before=await now_ms(bench.redis) + 500)
    await worker.claim(8, ())
    await bench.redis.zadd(bench.keys.delayed, {"gone": 1, "odd": 2})
    await bench.redis.set(bench.keys.job("odd"), "text", ex=60)

    (job,) = await until(lambda: bench.claimed(worker), "the promotion")

    assert job.id == "a"
    assert await bench.redis.zcard(bench.keys.delayed) == 0


async def test_dead_letter_can_be_requeued_once(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a", deadline="soon", tenant="t", body='{"prompt":"x"}')
    await worker.claim(8, ())
    ((letter, _),) = await bench.redis.xrange(bench.keys.dead)
    await bench.redis.set(bench.keys.cancel("a"), 1, ex=60)  # of its first life

    await scripts.requeue(bench.redis, bench.keys.base, letter.decode())

    (job,) = await bench.claimed(worker)
    assert (job.id, json.loads(job.body), job.tenant, job.epoch) == ("a", {"prompt": "x"}, "t", 1)
    assert await bench.entries("a") == []
    assert await bench.redis.xlen(bench.keys.bell) == 1
    with pytest.raises(Exception, match="no dead letter"):
        await scripts.requeue(bench.redis, bench.keys.base, letter.decode())


async def test_consumers_of_workers_killed_long_ago_are_reaped(bench: QueueBench) -> None:
    dead, alive = await bench.worker("dead", lease=0.05), await bench.worker("alive", lease=0.05)
    await finish(dead, await bench.one(dead, "first"), 0)
    job = await bench.one(alive)

    async def reaped() -> int:
        await alive.renew([job], {})
        await alive.claim(8, ("a",))
        return await alive.reap()

    assert await until(reaped, "the reaper")
    names = {c["name"] for c in await bench.redis.xinfo_consumers(bench.keys.jobs("normal", 0), "workers")}
    assert names == {b"alive"}


async def test_scripts_survive_script_flush(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a")
    await bench.redis.script_flush()

    assert await ids(bench, worker) == ["a"]


async def test_server_that_is_full_loses_nothing(bench: QueueBench, own_server: Server) -> None:
    client = connect(own_server.url)
    full = QueueBench(client, bench.keys)
    worker = await full.worker()
    job = await full.one(worker, "running")
    await full.submit("a")
    await client.config_set("maxmemory", 1)
    calls = [
        worker.renew([job], {}),
        publish(worker, job, 0, 1),
        worker.finish([FinishRow(job.id, job.epoch, 0, job.stream, job.entry, DONE)]),
        worker.join("digest"),
    ]
    for call in calls:  # none of it is the fault of a row or an entry
        with pytest.raises(Exception, match="maxmemory") as error:
            await call
        assert classify(error.value) == "transient"
    await client.config_set("maxmemory", 0)

    assert await ids(full, worker, active=("running",)) == ["a"]
    assert (await publish(worker, job, 0, 1)).status == "OK"
    assert await full.letters() == []
    await client.aclose()


async def test_dead_letters_are_bounded(bench: QueueBench) -> None:
    worker = await bench.worker()
    async with bench.redis.pipeline(transaction=False) as many:
        for _ in range(1500):
            many.xadd(bench.keys.jobs("normal", 0), {"body": "{}"})
        await many.execute()
    while (await worker.claim(8, ())).more:
        pass

    assert 1000 <= await bench.redis.xlen(bench.keys.dead) < 1200


async def test_hundred_delayed_jobs_at_most_are_promoted_at_once(bench: QueueBench) -> None:
    worker = await bench.worker()
    due = await now_ms(bench.redis) + 500
    async with bench.redis.pipeline(transaction=False) as many:
        for n in range(150):
            many.xadd(bench.keys.jobs("low", 0), {"id": f"j{n}", "body": "{}", "not_before": due})
        await many.execute()
    await worker.claim(8, ())
    assert await bench.redis.zcard(bench.keys.delayed) == 150
    await bench.redis.expire(bench.keys.job("j0"), 60)  # as if it had waited long for a worker beyond its time

    async def promoted() -> int:
        reply = await worker.claim(0, ())
        return kinds(reply).count("promoted")

    assert await until(promoted, "the promotion") == 100
    assert await bench.field("j0", "state") is None
    assert await bench.redis.xlen(bench.keys.bell) == 1
    assert await promoted() == 50
    assert 86_390_000 < await bench.redis.pttl(bench.keys.job("j0")) <= 86_400_000


async def test_job_that_has_begun_is_not_parked_again(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.redis.hset(bench.keys.job("a"), "claims", 1)
    await bench.submit("a", not_before=await now_ms(bench.redis) + 60_000)

    assert await ids(bench, worker) == ["a"]


async def test_parked_job_lives_as_long_as_its_wait_and_a_day(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a", not_before=await now_ms(bench.redis) + 7 * 86_400_000)
    await worker.claim(8, ())

    assert 8 * 86_400_000 - 10_000 < await bench.redis.pttl(bench.keys.job("a")) <= 8 * 86_400_000
