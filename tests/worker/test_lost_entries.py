"""Entries deleted, acknowledged or brought back behind the workers' backs: no accepted job is forgotten."""

import pytest

from gllm.keys import GROUP
from gllm.protocol import TERMINAL_ENTRY_ID
from tests.worker.queue_bench import QueueBench, finish, kinds, now_ms, publish, until
from worker.queue import Queue


async def ids(bench: QueueBench, worker: Queue, active: tuple[str, ...] = ()) -> list[str]:
    return [job.id for job in await bench.claimed(worker, active=active)]


async def owners(bench: QueueBench) -> list[bytes]:
    entries = await bench.redis.xpending_range(bench.keys.jobs("normal", 0), GROUP, "-", "+", 100)
    return [entry["consumer"] for entry in entries]


async def vanish(bench: QueueBench, entry: str, how: str) -> None:
    stream = bench.keys.jobs("normal", 0)
    if how == "deleted":
        await bench.redis.xdel(stream, entry)
    else:
        await bench.redis.xtrim(stream, 0, approximate=False)


@pytest.mark.parametrize("how", ["deleted", "trimmed"])
async def test_job_whose_entry_was_lost_runs_when_it_is_submitted_again(bench: QueueBench, how: str) -> None:
    dead, heir = await bench.worker("dead"), await bench.worker("heir")
    job = await bench.one(dead)
    await publish(dead, job, 0, 3)
    await bench.die(dead)
    await vanish(bench, job.entry, how)
    assert await ids(bench, heir) == []
    assert await bench.pending() == 0

    await bench.submit("a")
    (again,) = await bench.claimed(heir)

    assert (again.published, again.epoch) == (3, job.epoch + 1)
    assert (await finish(heir, again, 3)).status == "OK"
    assert await bench.entries("a") == ["3-0", TERMINAL_ENTRY_ID]
    await bench.clear_streams()


async def test_job_that_runs_without_its_entry_is_not_taken_from_its_worker_by_a_second_one(bench: QueueBench) -> None:
    owner, other = await bench.worker("owner"), await bench.worker("other")
    job = await bench.one(owner)
    await vanish(bench, job.entry, "deleted")
    await bench.submit("a")

    assert await ids(bench, other) == []
    assert (await finish(owner, job, 0)).status == "OK"
    await bench.idle(other)
    assert await ids(bench, other) == []
    await bench.clear_streams()
    assert await bench.entries("a") == [TERMINAL_ENTRY_ID]


async def test_parked_job_that_fell_out_of_the_set_runs_when_it_is_submitted_again(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a", not_before=await now_ms(bench.redis) + 60_000)
    await worker.claim(8, ())
    await bench.submit("a")
    assert await ids(bench, worker) == []  # it waits: this one is a duplicate
    await bench.redis.delete(bench.keys.delayed)
    await bench.submit("a")

    assert await ids(bench, worker) == ["a"]


@pytest.mark.parametrize("died", [False, True], ids=["owner alive", "owner dead"])
async def test_pending_entry_that_was_acknowledged_by_hand_is_not_lost(bench: QueueBench, died: bool) -> None:
    owner, heir = await bench.worker("owner"), await bench.worker("heir")
    job = await bench.one(owner)
    await publish(owner, job, 0, 2)
    await bench.redis.xack(bench.keys.jobs("normal", 0), GROUP, job.entry)

    if not died:
        await owner.renew([job], {})
        assert await owners(bench) == [b"owner"]
    await bench.die(owner)
    if died:
        heir.scan_soon()
        reply = await heir.claim(8, ())
        assert (kinds(reply), reply.more) == (["unowned"], True)
    (taken,) = await bench.claimed(heir)

    assert (taken.id, taken.published, taken.attempt) == ("a", 2, 1)


async def test_entry_that_nobody_has_is_left_to_the_live_worker_that_runs_its_job(bench: QueueBench) -> None:
    owner, other = await bench.worker("owner"), await bench.worker("other")
    job = await bench.one(owner)
    await bench.redis.xack(bench.keys.jobs("normal", 0), GROUP, job.entry)

    assert [await ids(bench, other) for _ in range(3)] == [[], [], []]
    assert (await publish(owner, job, 0, 1)).status == "OK"
    await owner.renew([job], {})
    assert await owners(bench) == [b"owner"]


@pytest.mark.parametrize("how", ["consumer deleted", "skipped by SETID"])
async def test_entries_that_the_group_left_behind_are_handed_out(bench: QueueBench, how: str) -> None:
    stream = bench.keys.jobs("normal", 0)
    dead, heir = await bench.worker("dead"), await bench.worker("heir")
    for n in range(150):
        await bench.submit(f"j{n}")
    if how == "consumer deleted":
        assert len(await bench.claimed(dead)) == 16
        await bench.die(dead)
        await bench.redis.xgroup_delconsumer(stream, GROUP, "dead")
    else:
        await bench.redis.xgroup_setid(stream, GROUP, "$")

    taken: list[str] = []
    for _ in range(25):
        for job in await bench.claimed(heir, active=tuple(taken)):
            assert (await finish(heir, job, 0)).status == "OK"
            taken.append(job.id)

    assert sorted(taken) == sorted(f"j{n}" for n in range(150))
    await bench.clear_streams()


async def test_entry_that_nobody_has_is_found_behind_hundreds_that_somebody_has(bench: QueueBench) -> None:
    stream = bench.keys.jobs("normal", 0)
    await bench.worker("owner", lease=60)
    heir = await bench.worker("heir", lease=60)
    async with bench.redis.pipeline(transaction=False) as many:
        for n in range(250):
            many.xadd(stream, {"id": f"j{n}", "body": "{}"})
        many.xreadgroup(GROUP, "owner", {stream: ">"}, count=250)
        many.xadd(stream, {"id": "lost", "body": "{}"})
        many.xgroup_setid(stream, GROUP, "$")
        await many.execute()

    heir.scan_soon()
    reply = await heir.claim(8, ())

    assert (kinds(reply), reply.more) == (["unowned"], True)
    assert await ids(bench, heir) == ["lost"]


async def test_entry_acknowledged_by_hand_can_still_be_released(bench: QueueBench) -> None:
    first, second = await bench.worker("first", lease=30), await bench.worker("second", lease=30)
    job = await bench.one(first)
    await bench.redis.xack(bench.keys.jobs("normal", 0), GROUP, job.entry)

    (answer,) = await first.release([job])

    assert (answer.status, await ids(bench, second)) == ("OK", ["a"])


@pytest.mark.parametrize("state", ["waiting", "pending"])
async def test_stream_that_comes_back_after_the_end_brings_no_job_back(bench: QueueBench, state: str) -> None:
    stream = bench.keys.jobs("normal", 0)
    worker = await bench.worker()
    await bench.submit("a")
    if state == "waiting":
        copy = await bench.redis.dump(stream)
    (job,) = await bench.claimed(worker)
    if state == "pending":
        copy = await bench.redis.dump(stream)
    await finish(worker, job, 0)
    await bench.redis.restore(stream, 0, copy, replace=True)
    assert await bench.redis.xlen(stream) == 1

    async def gone() -> bool:
        await worker.renew([], {})
        assert await ids(bench, worker) == []
        return await bench.redis.xlen(stream) == 0

    await until(gone, "the entry to go")
    assert await bench.entries("a") == [TERMINAL_ENTRY_ID]
    await bench.clear_streams()


async def test_flushed_queue_is_founded_anew_with_as_many_shards_as_it_had(bench: QueueBench) -> None:
    """Producers believe in the count they know for a minute: what they add to a shard must be served."""
    await bench.redis.hset(bench.keys.meta, "shards", 3)
    worker = await bench.worker()
    await bench.redis.delete(bench.keys.meta)

    await worker.join("digest")

    assert worker.shards == 3
    assert await bench.redis.hget(bench.keys.meta, "shards") == b"3"
    await bench.redis.xadd(bench.keys.jobs("normal", 2), {"id": "a", "body": "{}"})
    assert await ids(bench, worker) == ["a"]


async def test_reply_without_an_end_is_written_on_whatever_the_record_says(bench: QueueBench) -> None:
    """A failover lost the terminal event and the end of the entry, but not the record's end."""
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 3)
    kept = await bench.redis.dump(bench.keys.out("a"))
    await finish(worker, job, 3)
    await bench.redis.restore(bench.keys.out("a"), 60_000, kept, replace=True)

    await bench.submit("a")
    (again,) = await bench.claimed(worker)

    assert (again.published, again.epoch) == (3, job.epoch + 2)
    assert (await finish(worker, again, 3)).status == "OK"
    assert await bench.entries("a") == ["3-0", TERMINAL_ENTRY_ID]


async def test_reply_that_has_ended_ends_an_older_record_too(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    keys = [bench.keys.job("a"), bench.keys.jobs("normal", 0)]
    copies = [await bench.redis.dump(key) for key in keys]
    await finish(worker, job, 0)
    for key, copy in zip(keys, copies, strict=True):
        await bench.redis.restore(key, 60_000, copy, replace=True)
    await bench.redis.persist(keys[1])
    await bench.idle(worker)

    worker.scan_soon()
    reply = await worker.claim(8, ())

    assert (reply.jobs, kinds(reply)) == ([], ["ended"])
    assert (await bench.field("a", "state"), await bench.entries("a")) == ("ended", [TERMINAL_ENTRY_ID])
    assert await bench.field("a", "epoch") == str(job.epoch + 1)
    await bench.clear_streams()


async def test_ended_job_whose_reply_has_expired_is_not_run_again(bench: QueueBench) -> None:
    stream = bench.keys.jobs("normal", 0)
    worker = await bench.worker()
    job = await bench.one(worker)
    copy = await bench.redis.dump(stream)
    await finish(worker, job, 0)
    await bench.redis.delete(bench.keys.out("a"))
    await bench.redis.restore(stream, 0, copy, replace=True)
    await bench.idle(worker)

    assert await ids(bench, worker) == []
    assert await bench.entries("a") == []
    await bench.clear_streams()
