"""The claim script: order, budget, duplicates, ends before the start, bad entries. On real servers."""

import pytest

from gllm.protocol import TERMINAL_ENTRY_ID, Done, Error
from tests.worker.queue_bench import QueueBench, finish, kinds, now_ms, publish, until
from worker.backlog import Backlog
from worker.queue import Queue

MIB = 1024 * 1024


async def ids(bench: QueueBench, worker: Queue, want: int = 16, active: tuple[str, ...] = ()) -> list[str]:
    return [job.id for job in await bench.claimed(worker, want, active)]


async def test_scan_order_is_high_normal_low_and_reversed_every_eighth_time(bench: QueueBench) -> None:
    worker = await bench.worker()
    for n in range(10):
        for priority in ("low", "normal", "high"):
            await bench.submit(f"{priority}-{n}", priority)

    taken = [(await ids(bench, worker, want=1))[0] for _ in range(9)]

    assert taken == [*(f"high-{n}" for n in range(7)), "low-0", "high-7"]


async def test_want_is_the_budget_of_all_streams_together(bench: QueueBench) -> None:
    worker = await bench.worker()
    for priority in ("low", "normal", "high"):
        await bench.submit(f"{priority}-1", priority)
        await bench.submit(f"{priority}-2", priority)

    reply = await worker.claim(3, ())

    assert [job.id for job in reply.jobs] == ["high-1", "high-2", "normal-1"]
    assert reply.more
    assert [await bench.pending(p) for p in ("high", "normal", "low")] == [2, 1, 0]
    assert reply.waiting == {"high": Backlog(0, 0), "normal": Backlog(1, 1), "low": Backlog(2, 2)}


async def test_claimed_job_carries_everything_the_producer_said(bench: QueueBench) -> None:
    worker = await bench.worker()
    deadline = await now_ms(bench.redis) + 60_000
    body = b"\x81\xa6prompt\xa5\xff\x00\x01\x02\x03"
    fields = {"deadline": deadline, "tenant": "t", "affinity": "s", "traceparent": "00-1-2-03", "v": 1, "body": body}

    job = await bench.one(worker, **fields)

    assert (job.body, job.deadline_ms, job.tenant, job.affinity, job.traceparent) == (
        body, deadline, "t", "s", "00-1-2-03",
    )  # fmt: skip
    assert (job.epoch, job.attempt, job.claims, job.published, job.cached_tokens) == (1, 0, 1, 0, None)
    assert 0 <= job.claimed_ms - job.submitted_ms < 10_000


@pytest.mark.parametrize("when", ["waiting", "running", "ended"])
async def test_duplicate_is_dropped_even_of_an_ended_job(bench: QueueBench, when: str) -> None:
    worker = await bench.worker()
    await bench.submit("a")
    if when == "waiting":
        await bench.submit("a", "high", body='{"prompt":"other"}')
    (job,) = await bench.claimed(worker)
    if when == "ended":
        await finish(worker, job, 0)
    if when != "waiting":
        await bench.submit("a")

    assert await ids(bench, worker) == []
    if when != "ended":
        assert (await finish(worker, job, 0)).status == "OK"
    await bench.clear_streams()
    assert await bench.entries("a") == [TERMINAL_ENTRY_ID]


async def test_equal_entry_ids_in_two_streams_are_two_entries(bench: QueueBench) -> None:
    worker = await bench.worker()
    async with bench.redis.pipeline(transaction=True) as both:
        for priority in ("high", "low"):
            both.xadd(bench.keys.jobs(priority, 0), {"id": "a", "body": "{}"}, id="1-1")
        await both.execute()

    reply = await worker.claim(8, ())

    assert [job.stream for job in reply.jobs] == ["jobs:high:0"]
    assert kinds(reply) == ["duplicate"]


async def test_cancel_before_the_start_ends_the_job(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a")
    await bench.redis.set(bench.keys.cancel("a"), 1, ex=86400)

    assert await ids(bench, worker) == []
    (event,) = await bench.events("a")
    assert isinstance(event, Done)
    assert event.finish_reason == "cancelled"
    assert not await bench.redis.exists(bench.keys.cancel("a"))
    await bench.clear_streams()


async def test_passed_deadline_ends_the_job_with_what_was_published_counted(bench: QueueBench) -> None:
    first, second = await bench.worker("first"), await bench.worker("second")
    job = await bench.one(first, deadline=await now_ms(bench.redis) + 600)
    await publish(first, job, 0, 3)
    await bench.die(first)
    await until(lambda: _passed(bench, job.deadline_ms or 0), "the deadline")

    assert await ids(bench, second) == []
    end = (await bench.events("a"))[-1]
    assert isinstance(end, Done)
    assert (end.finish_reason, end.usage.completion_tokens) == ("deadline", 3)
    assert await bench.entries("a") == ["3-0", TERMINAL_ENTRY_ID]
    await bench.clear_streams()


async def _passed(bench: QueueBench, deadline_ms: int) -> bool:
    return await now_ms(bench.redis) > deadline_ms


BAD_ENTRIES = {
    "no id": {"id": None},
    "empty id": {"id": ""},
    "long id": {"id": "x" * 129},
    "id with a space": {"id": "a b"},
    "id with a newline": {"id": "a\n"},
    "binary id": {"id": b"\xff\x00\xfe"},
}
BAD_JOBS = {
    "no body": ({"body": None}, "invalid", "body"),
    "other version": ({"v": "2"}, "unsupported", "'2'"),
    "deadline in words": ({"deadline": "tomorrow"}, "invalid", "'tomorrow'"),
    "deadline nan": ({"deadline": "nan"}, "invalid", "'nan'"),
    "deadline 1e300": ({"deadline": "1e300"}, "invalid", "'1e300'"),
    "negative deadline": ({"deadline": "-1"}, "invalid", "'-1'"),
    "binary deadline": ({"deadline": b"\xff\xfe"}, "invalid", "'??'"),
    "not_before in words": ({"not_before": "later"}, "invalid", "'later'"),
    "huge not_before": ({"not_before": "9" * 16}, "invalid", "not_before"),
    "body of 4 MiB + 1": ({"body": b"x" * (4 * MIB + 1)}, "too_large", "4194305"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
async def test_entry_without_a_usable_id_becomes_a_dead_letter(bench: QueueBench, name: str) -> None:
    worker = await bench.worker()
    await bench.submit("before")
    await bench.submit(**{"job_id": "unused", **BAD_ENTRIES[name]})
    await bench.submit("after")

    assert await ids(bench, worker) == ["before", "after"]
    (letter,) = await bench.letters()
    assert (letter[b"reason"], letter[b"body"]) == (b"malformed", b"{}")
    assert await bench.pending() == 2


@pytest.mark.parametrize("name", BAD_JOBS)
async def test_bad_job_gets_one_error_that_names_the_value_and_neighbours_run(bench: QueueBench, name: str) -> None:
    fields, code, word = BAD_JOBS[name]
    worker = await bench.worker()
    await bench.submit("before")
    await bench.submit("bad", **fields)
    await bench.submit("after")

    assert await ids(bench, worker) == ["before", "after"]
    (event,) = await bench.events("bad")
    assert isinstance(event, Error)
    assert event.code == code
    assert word in event.message
    assert await bench.pending() == 2


async def test_number_that_is_none_is_a_dead_letter_too(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("bad", deadline="soon", traceparent="00-1-2-03", tenant="t")

    await worker.claim(8, ())

    (letter,) = await bench.letters()
    assert letter[b"error"] == b"deadline: unix milliseconds expected, got 'soon'"
    assert (letter[b"traceparent"], letter[b"tenant"], letter[b"stream"]) == (b"00-1-2-03", b"t", b"jobs:normal:0")


async def test_too_large_body_is_a_dead_letter_without_the_body(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("huge", body=b"x" * (32 * MIB))

    await worker.claim(8, ())

    (letter,) = await bench.letters()
    assert b"body" not in letter
    assert letter[b"body_bytes"] == str(32 * MIB).encode()
    assert len(letter[b"body_sha1"]) == 40


async def test_body_missing_is_no_dead_letter_because_the_client_knows(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("bad", body=None)

    await worker.claim(8, ())

    assert await bench.letters() == []


@pytest.mark.parametrize("key", ["job", "out"])
async def test_key_of_another_type_becomes_a_dead_letter_and_stops_nobody(bench: QueueBench, key: str) -> None:
    worker = await bench.worker()
    await bench.redis.set(bench.keys.job("bad") if key == "job" else bench.keys.out("bad"), "text", ex=60)
    await bench.submit("before")
    await bench.submit("bad")
    await bench.submit("after")

    assert await ids(bench, worker) == ["before", "after"]
    (letter,) = await bench.letters()
    assert b"WRONGTYPE" in letter[b"error"]
    assert await bench.pending() == 2


async def test_reply_that_somebody_else_wrote_to_ends_with_an_error_and_not_as_if_all_were_published(
    bench: QueueBench,
) -> None:
    worker = await bench.worker()
    await bench.redis.xadd(bench.keys.out("bad"), {"d": "x"})
    await bench.redis.expire(bench.keys.out("bad"), 60)
    await bench.submit("bad")
    await bench.submit("good")

    assert await ids(bench, worker) == ["good"]
    (letter,) = await bench.letters()
    assert b"FOREIGN" in letter[b"error"]
    last, fields = (await bench.redis.xrevrange(bench.keys.out("bad"), count=1))[0]
    assert last == TERMINAL_ENTRY_ID.encode()
    assert b'"type":"error"' in fields[b"d"]


async def test_dead_of_another_type_is_noted_and_the_entry_still_goes(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.redis.set(bench.keys.dead, "text", ex=60)
    await bench.submit("not usable")
    await bench.submit("bad", deadline="soon")
    await bench.submit("good")

    reply = await worker.claim(8, ())

    assert [job.id for job in reply.jobs] == ["good"]
    assert kinds(reply).count("unburied") == 2
    assert len(await bench.events("bad")) == 1
    assert await bench.pending() == 1


async def test_stream_of_another_type_is_noted_and_the_others_are_served(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.redis.delete(bench.keys.jobs("high", 0))
    await bench.redis.set(bench.keys.jobs("high", 0), "text", ex=60)
    await bench.submit("a")

    reply = await worker.claim(8, ())

    assert [job.id for job in reply.jobs] == ["a"]
    assert "stream" in kinds(reply)


async def test_one_reply_stays_under_16_mib(bench: QueueBench) -> None:
    worker = await bench.worker()
    for n in range(6):
        await bench.submit(str(n), body=b"x" * (4 * MIB))

    first = await worker.claim(16, ())
    second = await worker.claim(16, ())

    assert sum(len(job.body) for job in first.jobs) <= 16 * MIB
    assert first.more
    assert [job.id for job in first.jobs + second.jobs] == [str(n) for n in range(6)]


async def test_a_thousand_duplicates_take_several_short_calls(bench: QueueBench) -> None:
    worker = await bench.worker()
    for _ in range(1000):
        await bench.submit("a")
    await bench.submit("b")

    replies = [await worker.claim(16, ()) for _ in range(4)]

    assert [job.id for reply in replies for job in reply.jobs] == ["a", "b"]
    assert [reply.more for reply in replies] == [True, True, True, False]
