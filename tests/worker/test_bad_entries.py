"""Entries and keys that are not what they should be, between good ones: an error that says so, and the others run."""

import pytest

from gllm.protocol import TERMINAL_ENTRY_ID, Error
from tests.worker.queue_bench import DONE, QueueBench, finish, finish_row, kinds, now_ms, publish, tokens, until
from worker.queue import Queue
from worker.rows import FinishRow

MIB = 1024 * 1024
FAR = 10**15 - 1  # the latest moment that an entry may name, in the year 33658


async def ids(bench: QueueBench, worker: Queue, active: tuple[str, ...] = ()) -> list[str]:
    return [job.id for job in await bench.claimed(worker, active=active)]


async def error_of(bench: QueueBench, job_id: str) -> Error:
    """The one event of a reply that never began."""
    (event,) = await bench.events(job_id)
    assert isinstance(event, Error)
    return event


ODD_ENTRIES = {
    "NUL in the id": [b"id", b"a\x00b", b"body", b"{}"],
    "line end in the id": [b"id", b"a\nb", b"body", b"{}"],
    "UTF-8 id": [b"id", "ü".encode(), b"body", b"{}"],
    "a pattern as id": [b"id", b"%a+", b"body", b"{}"],
    "nothing but an empty field": [b"", b""],
    "binary field names": [b"\xff\xfe", b"\x00", b"i\x00d", b"x"],
    "5,000 fields": [b"f%d" % (n // 2) for n in range(10_000)],
    "32 MiB where the id should be": [b"id", b"x" * (32 * MIB), b"body", b"{}"],
    "32 MiB in a field nobody knows": [b"note", b"x" * (32 * MIB), b"body", b"{}"],
}


@pytest.mark.parametrize("name", ODD_ENTRIES)
async def test_odd_entry_is_a_dead_letter_between_good_ones(bench: QueueBench, name: str) -> None:
    worker = await bench.worker()
    await bench.submit("before")
    await bench.redis.execute_command("XADD", bench.keys.jobs("normal", 0), "*", *ODD_ENTRIES[name])
    await bench.submit("after")

    assert await ids(bench, worker) == ["before", "after"]
    (letter,) = await bench.letters()
    assert letter[b"reason"] == b"malformed"
    assert sum(map(len, letter.values())) < 70_000
    assert await bench.pending() == 2


async def test_of_a_field_that_comes_twice_the_last_one_counts(bench: QueueBench) -> None:
    worker = await bench.worker()
    fields = ("id", "a", "body", "1", "id", "b", "body", "2")
    await bench.redis.execute_command("XADD", bench.keys.jobs("normal", 0), "*", *fields)

    ((job),) = await bench.claimed(worker)

    assert (job.id, job.body) == ("b", b"2")


@pytest.mark.parametrize("label", ["tenant", "affinity", "traceparent"])
async def test_label_that_would_burst_the_reply_of_a_claim_is_refused_by_name(bench: QueueBench, label: str) -> None:
    worker = await bench.worker()
    await bench.submit("good", **{label: "x" * 1024})
    await bench.submit("long", **{label: "x" * 1025})
    await bench.submit("huge", **{label: b"x" * (32 * MIB)})

    reply = await worker.claim(8, ())

    assert [job.id for job in reply.jobs] == ["good"]
    assert (await error_of(bench, "long")).message == f"{label}: at most 1024 bytes expected, got 1025"
    assert (await error_of(bench, "huge")).code == "invalid"
    assert [len(letter[label.encode()]) for letter in await bench.letters()] == [1024, 1024]


async def test_bodies_of_32_mib_neither_burst_a_reply_nor_hold_up_their_neighbours(bench: QueueBench) -> None:
    worker = await bench.worker()
    for n in range(3):
        await bench.submit(f"huge{n}", body=b"x" * (32 * MIB))
        await bench.submit(f"large{n}", body=b"x" * (4 * MIB))

    first = await worker.claim(16, ())
    second = await worker.claim(16, ())

    assert [job.id for job in [*first.jobs, *second.jobs]] == ["large0", "large1", "large2"]
    assert sum(len(job.body) for job in first.jobs) < 16 * MIB
    assert [(await error_of(bench, f"huge{n}")).code for n in range(3)] == ["too_large"] * 3


BAD_TIMES = ["", "-0", "+5", " 5", "5 ", "5.0", "0x10", "inf", "٣", "5\n", str(10**15), "9" * 400]


@pytest.mark.parametrize("field", ["deadline", "not_before"])
async def test_time_that_is_no_plain_number_is_refused_by_name(bench: QueueBench, field: str) -> None:
    worker = await bench.worker()
    for n, text in enumerate(BAD_TIMES):
        await bench.submit(f"bad{n}", **{field: text})
    await bench.submit("good", deadline=FAR)

    assert await ids(bench, worker) == ["good"]
    for n in range(len(BAD_TIMES)):
        message = (await error_of(bench, f"bad{n}")).message
        assert message.startswith(f"{field}: unix milliseconds expected, got '")
        assert len(message) < 200


async def test_job_that_waits_for_the_end_of_time_is_parked_as_long(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a", not_before=FAR)

    assert kinds(await worker.claim(8, ())) == ["delayed"]
    assert await bench.redis.zscore(bench.keys.delayed, "a") == FAR
    assert await bench.redis.pexpiretime(bench.keys.job("a")) > FAR


@pytest.mark.parametrize("key", ["job", "out"])
async def test_broken_key_has_a_reason_of_its_own_and_a_new_id_may_help(bench: QueueBench, key: str) -> None:
    worker = await bench.worker()
    await bench.redis.set(bench.keys.job("bad") if key == "job" else bench.keys.out("bad"), "text", ex=60)
    await bench.submit("bad")

    reply = await worker.claim(8, ())

    assert [letter[b"reason"] for letter in await bench.letters()] == [b"broken_key"]
    assert "internal" in kinds(reply)
    if key == "job":
        error = await error_of(bench, "bad")
        assert (error.code, error.retryable) == ("internal", True)


async def test_record_that_is_nonsense_ends_its_job_only(bench: QueueBench) -> None:
    worker = await bench.worker()
    nonsense = {"state": "\xff", "entry": "?", "epoch": "x", "worker": b"\xff", "n": "-", "cached_tokens": "many"}
    for name, value in nonsense.items():
        await bench.redis.hset(bench.keys.job(name), mapping={name: value})
        await bench.redis.expire(bench.keys.job(name), 60)
        await bench.submit(name)
    await bench.submit("good")

    reply = await worker.claim(8, ())

    ended = [name for name in nonsense if await bench.events(name)]
    assert sorted([*ended, *(job.id for job in reply.jobs)]) == sorted([*nonsense, "good"])
    assert "good" in [job.id for job in reply.jobs]


async def test_delayed_of_another_type_ends_what_would_wait_and_the_rest_runs(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.redis.set(bench.keys.delayed, "text", ex=60)
    await bench.submit("later", not_before=await now_ms(bench.redis) + 60_000)
    await bench.submit("now")

    reply = await worker.claim(8, ())

    assert [job.id for job in reply.jobs] == ["now"]
    assert "WRONGTYPE" in (await error_of(bench, "later")).message
    assert any(note.kind == "stream" and note.text.startswith("delayed: WRONGTYPE") for note in reply.notes)
    assert await bench.pending() == 1


async def test_parked_job_whose_stream_became_something_else_is_ended_and_not_forgotten(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a", "high", not_before=await now_ms(bench.redis) + 500)
    await worker.claim(8, ())
    await bench.redis.delete(bench.keys.jobs("high", 0))
    await bench.redis.set(bench.keys.jobs("high", 0), "text", ex=60)

    await until(lambda: _after_a_claim(bench, worker, "a"), "the end")

    assert (await error_of(bench, "a")).code == "internal"
    assert [(letter[b"reason"], letter[b"body"]) for letter in await bench.letters()] == [(b"broken_key", b"{}")]
    assert await bench.redis.zcard(bench.keys.delayed) == 0


async def _after_a_claim(bench: QueueBench, worker: Queue, job_id: str) -> bool:
    await worker.claim(8, ())
    return bool(await bench.events(job_id))


async def test_parked_job_whose_record_became_something_else_is_ended(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.redis.zadd(bench.keys.delayed, {"odd": 2})
    await bench.redis.set(bench.keys.job("odd"), "text", ex=60)

    await worker.claim(8, ())

    assert "WRONGTYPE" in (await error_of(bench, "odd")).message


async def test_delayed_entry_with_thousands_of_fields_keeps_the_ones_that_count(bench: QueueBench) -> None:
    """All of them would not fit the stack of the script that adds the entry again, and the job would be lost."""
    worker = await bench.worker()
    due = str(await now_ms(bench.redis) + 1000)  # the claim has to come before
    many = [f"f{n // 2}" for n in range(12_000)]
    fields = ["id", "a", "body", "{}", "not_before", due, "tenant", "t", *many]
    await bench.redis.execute_command("XADD", bench.keys.jobs("normal", 0), "*", *fields)
    await worker.claim(8, ())
    assert await bench.redis.hlen(bench.keys.job("a")) < 20

    (job,) = await until(lambda: bench.claimed(worker), "the promotion")

    assert (job.id, job.body, job.tenant) == ("a", b"{}", "t")


async def test_bell_of_another_type_is_noted_and_not_listened_to(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.redis.set(bench.keys.bell, "text", ex=60)
    job = await bench.one(worker)

    (answer,) = await worker.release([job])
    reply = await worker.claim(8, ())

    assert (answer.status, [job.id for job in reply.jobs]) == ("OK", ["a"])
    assert "bell" in str(reply.notes)
    assert bench.keys.bell not in reply.positions
    assert bench.keys.jobs("normal", 0) in reply.positions


@pytest.mark.parametrize("key", ["workers", "meta"])
async def test_key_of_the_queue_that_is_of_another_type_is_named(bench: QueueBench, key: str) -> None:
    """Nothing can be claimed or renewed without it; Redis' own words would leave people to guess."""
    worker = await bench.worker()
    name = bench.keys.base + key
    await bench.redis.delete(name)
    await bench.redis.set(name, "text", ex=60)
    await bench.submit("a")

    for call in (worker.claim(8, ()), worker.renew([], {})):
        with pytest.raises(Exception, match=f"^WRONGTYPE {name}: Operation"):
            await call
    assert await bench.letters() == []


async def test_heartbeat_takes_its_key_back_from_something_of_another_type(bench: QueueBench) -> None:
    worker = await bench.worker()
    key = bench.keys.base + "worker:w1"
    await bench.redis.delete(key)
    await bench.redis.set(key, "text")

    await worker.renew([], {"host": "h"})

    beat = await bench.redis.hgetall(key)
    assert {b"host", b"since", b"heartbeat", b"lease"} <= set(beat)
    assert await bench.redis.pttl(key) > 0


async def test_worker_joins_beside_a_job_stream_of_another_type(bench: QueueBench) -> None:
    await bench.redis.set(bench.keys.jobs("high", 0), "text", ex=60)
    worker = await bench.worker()
    await bench.submit("a")

    assert await ids(bench, worker) == ["a"]


async def test_record_that_becomes_something_else_while_its_job_runs_ends_it_after_a_lease(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 2)
    await bench.redis.delete(bench.keys.job("a"))
    await bench.redis.set(bench.keys.job("a"), "text", ex=60)

    assert (await publish(worker, job, 2, 3)).status == "ERR"
    assert (await finish(worker, job, 2)).status == "ERR"
    await bench.idle(worker)
    assert await ids(bench, worker) == []

    assert await bench.entries("a") == ["2-0", TERMINAL_ENTRY_ID]
    await bench.clear_streams()


async def test_reply_with_an_entry_beyond_every_end_is_said_to_be_unpublishable(bench: QueueBench) -> None:
    """The server refuses our terminal event as it refuses a second one, but there is no first one."""
    worker = await bench.worker()
    job = await bench.one(worker)
    await bench.redis.xadd(bench.keys.out("a"), {"d": "x"}, id="9007199254740992-0")

    (answer,) = await worker.finish([FinishRow("a", job.epoch, 0, job.stream, job.entry, DONE)])

    assert answer.status == "ERR"
    assert [letter[b"reason"] for letter in await bench.letters()] == [b"unpublishable"]
    await bench.clear_streams()


@pytest.mark.parametrize("count", ["many", "1.5", "-1", "", "9" * 20])
async def test_count_of_tokens_that_is_none_is_the_fault_of_its_own_row_only(bench: QueueBench, count: str) -> None:
    worker = await bench.worker()
    bad, good = await bench.one(worker, "bad"), await bench.one(worker, "good")
    await bench.redis.hset(bench.keys.job("bad"), "n", count)

    appended = await worker.append([tokens(bad, 0, 1), tokens(good, 0, 1)])
    finished = await worker.finish([finish_row(bad, 0), finish_row(good, 1)])

    assert [answer.status for answer in (*appended, *finished)] == ["ERR", "OK", "ERR", "OK"]
    assert f"BROKEN job:bad has n '{count[:64]}'" in appended[0].text
    assert await bench.entries("good") == ["1-0", TERMINAL_ENTRY_ID]
