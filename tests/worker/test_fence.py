"""Append, finish, renew and release under the fence (epoch, worker): what a zombie, a retry or a repair may do."""

import pytest

from gllm.protocol import TERMINAL_ENTRY_ID, Error, encode_event
from tests.worker.queue_bench import QueueBench, finish, finish_row, publish, tokens
from worker.queue import Claimed
from worker.rows import AppendRow

FAILED = encode_event(Error(code="internal", message="nan", retryable=True))


def mark(job: Claimed, n: int, cached: int | str = "") -> AppendRow:
    event = b'{"type":"start","worker":"w","attempt":1,"numerics":"x","prompt_tokens":3,"cached_tokens":2}'
    return AppendRow("mark", job.id, job.epoch, n, n, event, cached)  # type: ignore[arg-type]


async def test_entry_ids_are_token_counts_and_marks_carry_the_epoch(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)

    answers = await worker.append([mark(job, 0, 2), tokens(job, 0, 3)])
    last = await worker.append([tokens(job, 3, 5)])
    end = await finish(worker, job, 5)

    assert [a.status for a in [*answers, *last, end]] == ["OK"] * 4
    assert await bench.entries("a") == ["0-1", "3-0", "5-0", TERMINAL_ENTRY_ID]
    assert await bench.field("a", "cached_tokens") == "2"
    await bench.clear_streams()


async def test_append_again_after_a_lost_answer_is_ok_and_writes_nothing(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)

    for _ in range(3):
        answers = await worker.append([mark(job, 0), tokens(job, 0, 3)])

    assert [(a.status, a.n) for a in answers] == [("OK", 3), ("OK", 3)]
    assert await bench.entries("a") == ["0-1", "3-0"]


async def test_mark_beyond_what_redis_has_is_a_gap(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 2)

    (answer,) = await worker.append([mark(job, 5)])

    assert (answer.status, answer.n) == ("GAP", 2)
    assert await bench.entries("a") == ["2-0"]


async def test_count_of_cached_tokens_is_that_of_the_first_start(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)

    await worker.append([mark(job, 0, 7)])
    await worker.append([mark(job, 0, 9)])

    assert await bench.field("a", "cached_tokens") == "7"


async def test_mark_again_is_ok(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)

    answers = [(await worker.append([mark(job, 0)]))[0].status for _ in range(2)]

    assert answers == ["OK", "OK"]
    assert await bench.entries("a") == ["0-1"]


async def test_append_says_gap_for_tokens_from_elsewhere(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 3)

    beyond = await publish(worker, job, 5, 6)
    merged = await publish(worker, job, 0, 5)  # the first part landed, its answer was lost, more came: once more from 0

    assert (beyond.status, beyond.n) == ("GAP", 3)
    assert (merged.status, merged.n) == ("GAP", 3)
    assert (await publish(worker, job, 3, 5)).status == "OK"


async def test_finish_says_gap_before_all_tokens_are_there(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 3)

    early = await finish(worker, job, 5)

    assert (early.status, early.n) == ("GAP", 3)
    assert await bench.entries("a") == ["3-0"]
    assert await bench.field("a", "state") == "running"


@pytest.mark.parametrize("other", ["epoch", "worker", "state"])
async def test_fence_refuses_another_epoch_another_worker_and_another_state(bench: QueueBench, other: str) -> None:
    owner = await bench.worker("owner")
    zombie = await bench.worker("zombie") if other == "worker" else owner
    job = await bench.one(owner)
    if other == "epoch":  # a failover has handed out one epoch twice: only the worker's name tells them apart
        await bench.redis.hincrby(bench.keys.job("a"), "epoch", 1)
    elif other == "state":
        await bench.redis.hset(bench.keys.job("a"), "state", "ended")

    answers = [
        await publish(zombie, job, 0, 1),
        await finish(zombie, job, 0),
        (await zombie.renew([job], {})).answers[0],
        (await zombie.release([job]))[0],
    ]

    assert [a.status for a in answers] == ["FENCED"] * 4
    assert await bench.entries("a") == []


async def test_zombie_renewal_does_not_steal_the_job_back(bench: QueueBench) -> None:
    old, new = await bench.worker("old"), await bench.worker("new")
    job = await bench.one(old)
    await bench.die(old)
    (taken,) = await bench.claimed(new)

    renewal = await old.renew([job], {})

    assert renewal.answers[0].status == "FENCED"
    (entry,) = await bench.redis.xpending_range(bench.keys.jobs("normal", 0), "workers", "-", "+", 1)
    assert entry["consumer"] == b"new"
    assert taken.epoch == job.epoch + 1


async def test_exactly_one_terminal_whoever_tries(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 2)

    first = await finish(worker, job, 2)
    (other,) = await worker.finish([finish_row(job, 2)._replace(event=FAILED)])
    late = await publish(worker, job, 2, 3)

    assert (first.status, other.status, late.status) == ("OK", "FENCED", "FENCED")
    assert await bench.entries("a") == ["2-0", TERMINAL_ENTRY_ID]


async def test_finish_again_after_a_lost_answer_is_ok_and_writes_nothing(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 2)

    answers = [await finish(worker, job, 2) for _ in range(3)]

    assert [(a.status, a.n) for a in answers] == [("OK", 2)] * 3
    assert await bench.entries("a") == ["2-0", TERMINAL_ENTRY_ID]
    assert await bench.field("a", "epoch") == str(job.epoch + 1)


async def test_finish_of_a_job_that_another_worker_has_ended_is_fenced_even_with_the_same_event(
    bench: QueueBench,
) -> None:
    old, new = await bench.worker("old"), await bench.worker("new")
    job = await bench.one(old)
    await bench.die(old)
    (taken,) = await bench.claimed(new)

    assert (await finish(new, taken, 0)).status == "OK"
    assert (await finish(old, job, 0)).status == "FENCED"


async def test_server_itself_refuses_a_second_terminal_when_the_record_is_older(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    record = await bench.redis.dump(bench.keys.job("a"))
    await finish(worker, job, 0)
    await bench.redis.restore(bench.keys.job("a"), 60_000, record, replace=True)  # a failover lost the end

    again, token = await finish(worker, job, 0), await publish(worker, job, 0, 1)

    assert (again.status, token.status) == ("OK", "FENCED")
    assert await bench.entries("a") == [TERMINAL_ENTRY_ID]


async def test_terminal_adds_one_to_the_epoch(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await finish(worker, job, 0)

    assert await bench.field("a", "epoch") == str(job.epoch + 1)


async def test_append_repairs_from_the_reply_when_the_record_is_older(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 3)
    record = await bench.redis.dump(bench.keys.job("a"))
    await publish(worker, job, 3, 6)
    await bench.redis.restore(bench.keys.job("a"), 60_000, record, replace=True)

    gap = await publish(worker, job, 6, 8)
    covered = await publish(worker, job, 3, 5)
    on = await publish(worker, job, 6, 8)

    assert (gap.status, gap.n) == ("GAP", 3)
    assert (covered.status, covered.n) == ("GAP", 6)
    assert await bench.field("a", "n") == "8"
    assert (on.status, await bench.entries("a")) == ("OK", ["3-0", "6-0", "8-0"])


async def test_cancel_is_seen_by_append_and_renew_and_its_wish_is_deleted_at_the_end(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await bench.redis.set(bench.keys.cancel("a"), 1, ex=86400)

    answer, renewal = await publish(worker, job, 0, 2), await worker.renew([job], {})
    await finish(worker, job, 2)

    assert (answer.status, answer.n) == ("CANCEL", 2)
    assert await bench.entries("a") == ["2-0", TERMINAL_ENTRY_ID]  # a cancelled row is published all the same
    assert renewal.answers[0].status == "CANCEL"
    assert not await bench.redis.exists(bench.keys.cancel("a"))


async def test_ended_job_ignores_a_cancel(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await finish(worker, job, 0)
    await bench.redis.set(bench.keys.cancel("a"), 1, ex=86400)

    assert (await publish(worker, job, 0, 1)).status == "FENCED"
    assert (await worker.renew([job], {})).answers[0].status == "FENCED"


async def test_bad_row_does_not_hurt_its_neighbours(bench: QueueBench) -> None:
    worker = await bench.worker()
    for job_id in ("a", "b", "c"):
        await bench.submit(job_id)
    jobs = await bench.claimed(worker)
    await bench.redis.set(bench.keys.out("b"), "no stream", ex=60)

    appended = await worker.append([tokens(job, 0, 2) for job in jobs])
    renewed = (await worker.renew(jobs, {})).answers
    finished = await worker.finish([finish_row(job, 0 if job.id == "b" else 2) for job in jobs])

    assert [a.status for a in appended] == ["OK", "ERR", "OK"]
    assert "WRONGTYPE" in appended[1].text
    assert [a.status for a in renewed] == ["OK"] * 3
    assert [a.status for a in finished] == ["OK", "ERR", "OK"]
    assert [letter[b"reason"] for letter in await bench.letters()] == [b"unpublishable"]
    await bench.clear_streams()


async def test_released_job_is_claimable_at_once_and_not_charged(bench: QueueBench) -> None:
    first, second = await bench.worker("first", lease=30), await bench.worker("second", lease=30)
    job = await bench.one(first)
    await publish(first, job, 0, 2)

    (answer,) = await first.release([job])
    (taken,) = await bench.claimed(second)

    assert answer.status == "OK"
    assert (taken.epoch, taken.attempt, taken.claims, taken.published) == (job.epoch + 2, 0, 2, 2)
    assert not taken.suspect
    assert (await publish(first, job, 2, 3)).status == "FENCED"
    assert await bench.redis.xlen(bench.keys.bell) == 1


async def test_released_and_charged_job_is_a_suspect(bench: QueueBench) -> None:
    first, second = await bench.worker("first"), await bench.worker("second")
    job = await bench.one(first)

    await first.release([job], charged=frozenset(["a"]))
    (taken,) = await bench.claimed(second)

    assert (taken.attempt, taken.suspect) == (1, True)


async def test_job_whose_entry_was_deleted_cannot_be_released(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await bench.redis.xdel(bench.keys.jobs("normal", 0), job.entry)

    (answer,) = await worker.release([job])

    assert answer.status == "GONE"
    assert (await finish(worker, job, 0)).status == "OK"  # so that it still gets its one terminal event


async def test_leaving_keeps_a_consumer_with_pending_entries(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)

    assert await worker.leave() == 1
    assert await bench.pending() == 1
    await bench.redis.xack(bench.keys.jobs("normal", 0), "workers", job.entry)
    assert await worker.leave() == 0
    assert await bench.redis.zcard(bench.keys.workers) == 0
