"""The claim script: who is charged with the death of a worker, trials, and the quiet time after a downtime."""

from gllm.protocol import Error
from tests.worker.queue_bench import QueueBench, finish, now_ms, publish, until
from worker.queue import MAX_ATTEMPTS, MAX_CLAIMS, REVERSED_EVERY, Queue


async def ids(bench: QueueBench, worker: Queue, want: int = 16, active: tuple[str, ...] = ()) -> list[str]:
    return [job.id for job in await bench.claimed(worker, want, active)]


async def test_death_of_the_worker_charges_an_attempt_and_a_new_token_acquits(bench: QueueBench) -> None:
    first, second = await bench.worker("first"), await bench.worker("second")
    await bench.one(first)
    await bench.die(first)

    (job,) = await bench.claimed(second)
    assert (job.attempt, job.suspect) == (1, True)
    assert await bench.redis.hget(bench.keys.worker("second"), "trial") == b"a"

    await publish(second, job, 0, 1)
    assert await bench.field("a", "attempts") == "0"
    assert await bench.redis.hget(bench.keys.worker("second"), "trial") is None


async def test_live_worker_whose_lease_ran_out_is_not_charged(bench: QueueBench) -> None:
    first, second = await bench.worker("first"), await bench.worker("second")
    await bench.one(first)
    await bench.die(first)
    await first.renew([], {})  # it lives: it does not know of this job, because the claim's answer was lost

    (job,) = await bench.claimed(second)

    assert (job.attempt, job.suspect) == (0, False)


async def test_worker_holds_one_trial_at_a_time_and_takes_innocents_beside_it(bench: QueueBench) -> None:
    first, second = await bench.worker("first"), await bench.worker("second")
    for n in range(3):
        await bench.submit(f"s{n}")
    await bench.claimed(first)
    await bench.die(first)
    await bench.submit("new")

    (trial, new) = await bench.claimed(second)
    assert (trial.suspect, new.id, new.suspect) == (True, "new", False)
    assert await ids(bench, second, active=(trial.id, "new")) == []

    await publish(second, trial, 0, 1)
    (following,) = await bench.claimed(second, active=(trial.id, "new"))
    assert following.suspect


async def test_hundreds_of_suspects_neither_hide_other_jobs_nor_keep_a_worker_claiming(bench: QueueBench) -> None:
    """All wait for the one trial: a worker that is told that there is more would ask again at once, and again."""
    first, second = await bench.worker("first"), await bench.worker("second")
    for n in range(300):
        await bench.submit(f"s{n}")
    await bench.submit("innocent")
    jobs = [job for _ in range(20) for job in await bench.claimed(first)]
    await first.release(jobs, charged=frozenset(job.id for job in jobs if job.id != "innocent"))
    (trial, *_) = await bench.claimed(second, want=1)

    reply = await second.claim(16, (trial.id,))
    await bench.submit("new")
    later = [await second.claim(16, (trial.id, "innocent")) for _ in range(REVERSED_EVERY - 2)]

    assert ([job.id for job in reply.jobs], reply.more) == (["innocent"], False)
    assert [[job.id for job in one.jobs] for one in later] == [[], [], [], [], [], ["new"]]
    assert not any(one.more for one in later)


async def test_suspects_come_before_new_jobs_as_their_trials_end(bench: QueueBench) -> None:
    """A worker that takes over from a dead one has as much room as that had: new jobs must not fill it meanwhile."""
    first, second = await bench.worker("first"), await bench.worker("second")
    suspects = [await bench.submit(f"s{n}") and f"s{n}" for n in range(6)]
    await bench.claimed(first)
    await bench.die(first)
    for n in range(9):
        await bench.submit(f"new{n}")

    order: list[str] = []
    for room in range(6, 0, -1):
        second.scan_soon()
        reply = await second.claim(room, order)
        assert (reply.kept, reply.more) == (room > 1, room == 1)
        order += [job.id for job in reply.jobs]
        await publish(second, reply.jobs[0], 0, 1)

    assert order == suspects


async def test_only_the_job_on_trial_is_charged_when_its_worker_dies(bench: QueueBench) -> None:
    first, second, third = [await bench.worker(name) for name in ("first", "second", "third")]
    await bench.one(first, "poison")
    await bench.die(first)
    await bench.submit("innocent")
    assert {job.id for job in await bench.claimed(second)} == {"poison", "innocent"}
    await bench.die(second)

    taken = {job.id: job for job in await bench.claimed(third)}

    assert (taken["poison"].attempt, taken["innocent"].attempt) == (2, 0)
    assert not taken["innocent"].suspect


async def test_poison_job_ends_after_four_charged_attempts_as_a_dead_letter_and_an_error(bench: QueueBench) -> None:
    await bench.submit("poison", traceparent="00-1-2-03")
    claims = 0
    for n in range(MAX_ATTEMPTS + 2):
        worker = await bench.worker(f"w{n}")
        claims += len(await bench.claimed(worker))
        await bench.die(worker)

    assert claims == MAX_ATTEMPTS
    (event,) = await bench.events("poison")
    assert isinstance(event, Error)
    assert event.code == "max_attempts"
    (letter,) = await bench.letters()
    assert (letter[b"reason"], letter[b"attempts"], letter[b"worker"]) == (b"max_attempts", b"4", b"w3")
    assert letter[b"traceparent"] == b"00-1-2-03"
    await bench.clear_streams()


async def test_backstop_of_claims_ends_what_is_never_charged(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.submit("a")
    for _ in range(MAX_CLAIMS):
        (job,) = await bench.claimed(worker)
        await worker.release([job])

    assert await ids(bench, worker) == []
    assert [event.code for event in await bench.events("a") if isinstance(event, Error)] == ["max_attempts"]


async def test_after_a_downtime_of_the_server_nothing_is_reclaimed_for_a_lease(bench: QueueBench) -> None:
    one, two = await bench.worker("one"), await bench.worker("two")
    await bench.one(one)
    await bench.die(one)
    await bench.die(two)  # nobody could write a heartbeat for long: it was the server that was away

    await two.renew([], {})
    assert await ids(bench, two) == []
    await two.renew([], {})
    assert await ids(bench, two) == []  # the fresh heartbeat does not end the quiet time

    assert await until(lambda: _renewed_claim(bench, two), "the end of the quiet time") == ["a"]


async def _renewed_claim(bench: QueueBench, worker: Queue) -> list[str]:
    await worker.renew([], {})
    return await ids(bench, worker)


async def test_quiet_time_is_over_once_the_servers_clock_was_set_back_before_it(bench: QueueBench) -> None:
    dead, heir = await bench.worker("dead"), await bench.worker("heir")
    await bench.one(dead)
    await bench.die(dead)
    from_ms = await now_ms(bench.redis) + 3_600_000

    await bench.redis.hset(bench.keys.meta, mapping={"quiet_from": from_ms, "quiet_until": from_ms + 1000})

    assert await ids(bench, heir) == ["a"]


async def test_new_jobs_leave_room_in_the_quiet_time_for_those_that_may_be_taken_over_after_it(
    bench: QueueBench,
) -> None:
    """All workers had died: the first that comes back must not be full of new jobs when it may look after the old."""
    first, second = await bench.worker("first"), await bench.worker("second")
    suspects = [await bench.submit(f"s{n}") and f"s{n}" for n in range(3)]
    await bench.claimed(first)
    await bench.die(first)
    await bench.redis.hset(bench.keys.meta, "quiet_until", await now_ms(bench.redis) + 60_000)
    for n in range(4):
        await bench.submit(f"new{n}")

    reply = await second.claim(4, ())
    assert ([job.id for job in reply.jobs], reply.kept) == (["new0"], True)

    await bench.redis.hdel(bench.keys.meta, "quiet_until")
    order: list[str] = ["new0"]
    for room in (3, 2, 1):
        (job,) = (await second.claim(room, order)).jobs
        order.append(job.id)
        await publish(second, job, 0, 1)
        second.scan_soon()
    assert order == ["new0", *suspects]


async def test_released_jobs_are_claimable_in_the_quiet_time(bench: QueueBench) -> None:
    one, two = await bench.worker("one", lease=60), await bench.worker("two", lease=60)
    job = await bench.one(one)
    await one.release([job])
    await bench.redis.hset(bench.keys.meta, "quiet_until", await now_ms(bench.redis) + 60_000)

    assert await ids(bench, two) == ["a"]


async def test_trial_that_this_worker_has_lost_is_in_nobodys_way(bench: QueueBench) -> None:
    first, second, third = [await bench.worker(name) for name in ("first", "second", "third")]
    for job_id in ("s0", "s1"):
        await bench.submit(job_id)
    await bench.claimed(first)
    await bench.die(first)
    (trial,) = await bench.claimed(second)
    await second.release([trial])
    await bench.claimed(third)
    await bench.redis.hset(bench.keys.worker("second"), "trial", trial.id)  # as if the release's answer were older

    (following,) = await bench.claimed(second)

    assert following.id != trial.id
    assert following.suspect


async def test_trial_ends_with_its_job(bench: QueueBench) -> None:
    first, second = await bench.worker("first"), await bench.worker("second")
    await bench.one(first)
    await bench.die(first)
    (trial,) = await bench.claimed(second)

    await finish(second, trial, 0)

    assert await bench.redis.hget(bench.keys.worker("second"), "trial") is None


async def test_trial_of_a_worker_whose_heartbeat_is_gone_expires(bench: QueueBench) -> None:
    first, second = await bench.worker("first"), await bench.worker("second")
    await bench.one(first)
    await bench.die(first)
    await bench.redis.delete(bench.keys.worker("second"))

    assert await ids(bench, second) == ["a"]
    assert 0 < await bench.redis.pttl(bench.keys.worker("second")) <= 10 * second.lease_ms
