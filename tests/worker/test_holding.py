"""Renew and release, row by row: how long keys live, what a bad row does to the others, what is handed back how."""

import pytest

from gllm.keys import GROUP
from tests.worker.queue_bench import QueueBench, finish_row, publish, tokens

DAY_MS = 86_400_000


async def test_renewal_keeps_record_and_reply_for_another_day(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 1)
    keys = [bench.keys.job("a"), bench.keys.out("a")]
    for key in keys:
        await bench.redis.expire(key, 60)

    await worker.renew([job], {})

    lives = [await bench.redis.pttl(key) for key in keys]
    assert [DAY_MS - 10_000 < life <= DAY_MS for life in lives] == [True, True]


async def test_renewal_says_whether_the_queues_meta_is_there(bench: QueueBench) -> None:
    worker = await bench.worker()
    before = await worker.renew([], {})
    await bench.redis.delete(bench.keys.meta)
    after = await worker.renew([], {})

    assert (before.known, after.known) == (True, False)


async def test_renewal_counts_what_waits_beside_a_lost_group(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a")
    await bench.redis.xgroup_destroy(bench.keys.jobs("high", 0), GROUP)

    counts = (await worker.renew([], {})).waiting
    assert {priority: backlog.waiting for priority, backlog in counts.items()} == {"high": 0, "normal": 1, "low": 0}


async def test_row_whose_record_is_broken_does_not_hurt_its_neighbours(bench: QueueBench) -> None:
    worker = await bench.worker()
    for job_id in ("a", "b", "c", "d"):
        await bench.submit(job_id)
    *jobs, last = await bench.claimed(worker)
    await bench.redis.delete(bench.keys.job("b"))
    await bench.redis.set(bench.keys.job("b"), "text", ex=60)

    answers = [
        await worker.append([tokens(job, 0, 1) for job in jobs]),
        (await worker.renew(jobs, {})).answers,
        await worker.release([jobs[0], jobs[1], last]),
        await worker.finish([finish_row(job, 1) for job in jobs[1:]]),
    ]

    assert [[answer.status for answer in each] for each in answers] == [["OK", "ERR", "OK"]] * 3 + [["ERR", "OK"]]
    assert "WRONGTYPE" in answers[3][0].text


async def test_what_is_released_is_idle_enough_for_anybody_and_counts_as_no_delivery(bench: QueueBench) -> None:
    worker = await bench.worker(lease=60)
    job = await bench.one(worker)

    await worker.release([job])

    (entry,) = await bench.redis.xpending_range(bench.keys.jobs("normal", 0), GROUP, "-", "+", 1)
    assert (entry["consumer"], entry["times_delivered"]) == (b"-released", 1)
    assert entry["time_since_delivered"] >= worker.lease_ms
    assert (await bench.field("a", "state"), await bench.field("a", "worker")) == (None, None)
    assert await bench.field("a", "epoch") == str(job.epoch + 1)


async def test_release_ends_a_trial(bench: QueueBench) -> None:
    first, second = await bench.worker("first"), await bench.worker("second")
    await bench.one(first)
    await bench.die(first)
    (trial,) = await bench.claimed(second)

    await second.release([trial])

    assert await bench.redis.hget(bench.keys.worker("second"), "trial") is None


@pytest.mark.parametrize("other", ["epoch", "worker", "event"])
async def test_finish_that_is_sent_again_is_ok_for_its_own_end_only(bench: QueueBench, other: str) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    row = finish_row(job, 0)
    assert [answer.status for answer in await worker.finish([row])] == ["OK"]
    if other == "event":
        row = row._replace(event=b'{"type":"error","code":"internal","message":"x"}')
    else:
        await bench.redis.hset(bench.keys.job("a"), other, "7")

    assert [answer.status for answer in await worker.finish([row])] == ["FENCED"]


async def test_append_that_the_stream_has_already_is_ok_though_the_record_is_older(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 3)
    record = await bench.redis.dump(bench.keys.job("a"))
    await publish(worker, job, 3, 6)
    await bench.redis.restore(bench.keys.job("a"), 60_000, record, replace=True)

    answer = await publish(worker, job, 3, 6)

    assert (answer.status, answer.n, await bench.entries("a")) == ("OK", 6, ["3-0", "6-0"])
