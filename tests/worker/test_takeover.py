"""The claim script: expired leases, lost answers, lost records, replies, entries and groups."""

import time

import pytest

from gllm.protocol import TERMINAL_ENTRY_ID
from tests.worker.queue_bench import QueueBench, finish, kinds, now_ms, publish, tokens, until
from worker.queue import Queue
from worker.rows import AppendRow


async def ids(bench: QueueBench, worker: Queue, want: int = 16, active: tuple[str, ...] = ()) -> list[str]:
    return [job.id for job in await bench.claimed(worker, want, active)]


async def test_expired_job_is_taken_over_with_what_was_published(bench: QueueBench) -> None:
    dead, heir = await bench.worker("dead"), await bench.worker("heir")
    job = await bench.one(dead)
    await dead.append([tokens(job, 0, 2), tokens(job, 2, 3)])
    assert await ids(bench, heir) == []  # the lease holds
    await bench.die(dead)

    (taken,) = await bench.claimed(heir)

    assert (taken.published, taken.epoch, taken.claims, taken.taken_from) == (3, 2, 2, "dead")
    assert (await heir.published("a")).ids == [0, 1, 2]
    assert (await publish(dead, job, 3, 4)).status == "FENCED"
    assert (await publish(heir, taken, 3, 4)).status == "OK"


async def test_lease_holds_while_it_is_renewed(bench: QueueBench) -> None:
    owner, other = await bench.worker("owner", lease=0.15), await bench.worker("other", lease=0.15)
    job = await bench.one(owner)
    end = time.monotonic() + 0.5

    while time.monotonic() < end:
        await owner.renew([job], {})
        await other.renew([], {})
        assert await ids(bench, other) == []

    (entry,) = await bench.redis.xpending_range(bench.keys.jobs("normal", 0), "workers", "-", "+", 1)
    assert (entry["consumer"], entry["times_delivered"]) == (b"owner", 1)  # JUSTID: renewals are no deliveries


async def test_job_of_a_worker_with_a_longer_lease_is_left_to_it_for_that_lease(bench: QueueBench) -> None:
    owner, hasty = await bench.worker("owner", lease=60), await bench.worker("hasty")
    job = await bench.one(owner)
    stream = bench.keys.jobs("normal", 0)
    await bench.redis.zadd(bench.keys.workers, {"owner": await now_ms(bench.redis) - 20_000})  # a third of its lease
    await bench.redis.xclaim(stream, "workers", "owner", 0, [job.entry], idle=20_000, justid=True)

    assert await ids(bench, hasty) == []
    await bench.die(owner)

    (taken,) = await bench.claimed(hasty)
    assert (taken.taken_from, taken.suspect) == ("owner", True)


async def test_active_job_is_never_reclaimed_here(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await bench.idle(worker)

    assert await ids(bench, worker, active=("a",)) == []
    assert (await publish(worker, job, 0, 1)).status == "OK"


async def test_id_that_is_active_here_waits_when_it_was_submitted_again_after_its_record_was_lost(
    bench: QueueBench,
) -> None:
    worker = await bench.worker()
    await bench.one(worker)
    await bench.redis.delete(bench.keys.job("a"))
    await bench.redis.xtrim(bench.keys.jobs("normal", 0), 0)
    await bench.submit("a")

    assert await ids(bench, worker, active=("a",)) == []
    await bench.idle(worker)
    assert await ids(bench, worker) == ["a"]


async def test_claim_whose_answer_was_lost_is_taken_up_by_the_next_one(bench: QueueBench, monkeypatch) -> None:
    worker = await bench.worker(lease=60)
    await bench.submit("held")
    (held,) = await bench.claimed(worker)
    await bench.submit("a")
    real = worker.redis.evalsha

    async def lost(*args: object) -> object:
        await real(*args)
        raise ConnectionError("the answer is lost")

    monkeypatch.setattr(worker.redis, "evalsha", lost)
    with pytest.raises(ConnectionError):
        await worker.claim(8, ("held",))
    monkeypatch.setattr(worker.redis, "evalsha", real)

    (job,) = (await worker.claim(8, ("held",))).jobs

    assert (job.id, job.epoch, job.attempt, job.claims) == ("a", 2, 0, 2)
    assert held.id == "held"


async def test_record_gone_and_reply_alive_goes_on_from_the_reply(bench: QueueBench) -> None:
    dead, heir = await bench.worker("dead"), await bench.worker("heir")
    job = await bench.one(dead)
    await publish(dead, job, 0, 3)
    await bench.redis.delete(bench.keys.job("a"))
    await bench.die(dead)

    (taken,) = await bench.claimed(heir)

    assert taken.published == 3
    assert (await publish(heir, taken, 3, 4)).status == "OK"
    assert (await publish(dead, job, 3, 4)).status == "FENCED"


async def test_record_gone_and_reply_ended_drops_the_entry(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await finish(worker, job, 0)
    await bench.redis.delete(bench.keys.job("a"))
    await bench.submit("a")

    reply = await worker.claim(8, ())

    assert (reply.jobs, kinds(reply)) == ([], ["ended"])
    assert await bench.entries("a") == [TERMINAL_ENTRY_ID]
    await bench.clear_streams()


async def test_reply_gone_and_tokens_published_goes_on_publishing_from_there(bench: QueueBench) -> None:
    dead, heir = await bench.worker("dead"), await bench.worker("heir")
    job = await bench.one(dead)
    await publish(dead, job, 0, 3)
    await bench.redis.delete(bench.keys.out("a"))
    await bench.die(dead)

    (taken,) = await bench.claimed(heir)

    assert (taken.published, (await heir.published("a")).ids) == (3, [])
    assert (await publish(heir, taken, 3, 5)).status == "OK"


@pytest.mark.parametrize("older", ["record", "reply"])
async def test_older_record_or_reply_after_a_failover_leaves_no_hole(bench: QueueBench, older: str) -> None:
    dead, heir = await bench.worker("dead"), await bench.worker("heir")
    job = await bench.one(dead)
    await publish(dead, job, 0, 3)
    key = bench.keys.job("a") if older == "record" else bench.keys.out("a")
    copy = await bench.redis.dump(key)
    await publish(dead, job, 3, 6)
    await bench.redis.restore(key, 60_000, copy, replace=True)
    await bench.die(dead)

    (taken,) = await bench.claimed(heir)

    assert taken.published == len((await heir.published("a")).ids) == (6 if older == "record" else 3)


async def test_entry_deleted_while_pending_is_acked_away(bench: QueueBench) -> None:
    dead, heir = await bench.worker("dead"), await bench.worker("heir")
    await bench.one(dead)
    await bench.redis.xtrim(bench.keys.jobs("normal", 0), 0)

    async def noted() -> list[str]:
        await heir.renew([], {})
        heir.scan_soon()
        return kinds(await heir.claim(8, ()))

    assert await until(noted, "the scan") == ["vanished"]
    assert await bench.pending() == 0


@pytest.mark.parametrize("how", ["destroyed", "stream deleted"])
async def test_lost_group_is_made_again_at_id_0(bench: QueueBench, how: str) -> None:
    worker = await bench.worker()
    stream = bench.keys.jobs("normal", 0)
    if how == "destroyed":
        await bench.redis.xgroup_destroy(stream, "workers")
    else:
        await bench.redis.delete(stream)
    await bench.submit("a")

    reply = await worker.claim(8, ())

    assert ([job.id for job in reply.jobs], reply.groups_made) == (["a"], 1)


async def test_running_job_is_not_taken_from_its_live_worker_when_the_group_was_lost(bench: QueueBench) -> None:
    owner, other = await bench.worker("owner"), await bench.worker("other")
    job = await bench.one(owner)
    await bench.redis.xgroup_destroy(bench.keys.jobs("normal", 0), "workers")

    assert await ids(bench, other) == []
    assert (await owner.renew([job], {})).answers[0].status == "OK"
    (entry,) = await bench.redis.xpending_range(bench.keys.jobs("normal", 0), "workers", "-", "+", 1)
    assert entry["consumer"] == b"owner"
    assert (await publish(owner, job, 0, 1)).status == "OK"


async def test_expired_jobs_left_for_want_of_room_come_before_new_ones_and_low_ones_have_their_turn(
    bench: QueueBench,
) -> None:
    """A busy worker claims one job at a time. Between two of them it must not wait as long as between two scans."""
    lost, busy = await bench.worker("lost", lease=9.0), await bench.worker("busy", lease=9.0, scan_seconds=9.0)
    old = [f"old-{n}" for n in range(10)]
    for name in old:
        await bench.submit(name, "low" if name == "old-9" else "normal")
    assert len(await bench.claimed(lost)) == len(old)
    await bench.idle(lost)
    for n in range(10):
        await bench.submit(f"new-{n}")

    taken: list[str] = []
    for _ in old:
        taken += [job.id for job in (await busy.claim(1, taken)).jobs]

    assert taken == [*old[:7], "old-9", *old[7:9]]


async def test_mark_of_a_new_owner_sorts_behind_those_of_lost_epochs(bench: QueueBench) -> None:
    """The record is gone, and with it the count of owners: a mark with a smaller number would be refused silently."""
    dead, heir = await bench.worker("dead"), await bench.worker("heir")
    job = await bench.one(dead)
    await bench.redis.hset(bench.keys.job("a"), "epoch", 5)
    await dead.append([mark(job.id, 5, 0)])
    await bench.redis.delete(bench.keys.job("a"))
    await bench.die(dead)

    (taken,) = await bench.claimed(heir)
    await heir.append([mark("a", taken.epoch, 0)])

    assert taken.epoch == 6
    assert await bench.entries("a") == ["0-5", "0-6"]


def mark(job_id: str, epoch: int, n: int) -> AppendRow:
    return AppendRow("mark", job_id, epoch, n, n, b'{"type":"resume"}')


async def test_own_jobs_of_a_lost_answer_are_not_charged_however_old_the_heartbeat(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.one(worker)
    await bench.die(worker)
    await bench.redis.zadd(bench.keys.workers, {"other": await now_ms(bench.redis)})

    (job,) = await bench.claimed(worker)

    assert (job.attempt, job.claims) == (0, 2)


async def test_claim_that_saw_a_thousand_pending_entries_says_that_there_may_be_more(bench: QueueBench) -> None:
    worker = await bench.worker(lease=60)
    stream = bench.keys.jobs("normal", 0)
    async with bench.redis.pipeline(transaction=False) as many:
        for n in range(1100):
            many.xadd(stream, {"id": f"j{n}", "body": "{}"})
        many.xreadgroup("workers", "-released", {stream: ">"}, count=1100)
        await many.execute()

    busy = [f"j{n}" for n in range(1000) if n != 500]
    reply = await worker.claim(8, busy)

    assert ([job.id for job in reply.jobs], reply.more) == (["j500"], True)
