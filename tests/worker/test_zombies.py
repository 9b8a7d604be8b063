"""Workers that were taken for dead and come back: the charge for a death that was none is taken back."""

from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from tests.worker.queue_bench import QueueBench, finish_row, publish, tokens
from worker.queue import MAX_ATTEMPTS, Claimed, Queue

Speak = Callable[[Queue, Claimed], Awaitable[object]]
WAYS: dict[str, Speak] = {
    "append": lambda worker, job: worker.append([tokens(job, job.published, job.published + 1)]),
    "finish": lambda worker, job: worker.finish([finish_row(job, job.published)]),
    "renew": lambda worker, job: worker.renew([job], {}),
    "release": lambda worker, job: worker.release([job]),
}


async def passed_on(bench: QueueBench, job: Claimed, owner: Queue, heir: Queue) -> Claimed:
    """The owner is frozen for longer than its lease, and another worker has the job then."""
    await bench.die(owner)
    (taken,) = await bench.claimed(heir)
    assert (taken.id, taken.taken_from) == (job.id, owner.worker)
    return taken


@pytest.mark.parametrize("way", WAYS)
async def test_worker_that_was_taken_for_dead_takes_the_charge_back_when_it_speaks(bench: QueueBench, way: str) -> None:
    first, second, third = [await bench.worker(name) for name in ("first", "second", "third")]
    job = await passed_on(bench, await bench.one(first), first, second)
    await passed_on(bench, job, second, third)
    assert await bench.field("a", "attempts") == "2"

    for _ in range(2):  # once only, however often it speaks
        await WAYS[way](second, job)
        assert await bench.field("a", "attempts") == "1"


async def test_charge_for_a_real_death_stays(bench: QueueBench) -> None:
    first, second, third, fourth = [await bench.worker(f"w{n}") for n in range(4)]
    job = await passed_on(bench, await bench.one(first), first, second)
    job = await passed_on(bench, job, second, third)
    await passed_on(bench, job, third, fourth)

    await second.renew([job], {})  # not the one that was charged last

    assert await bench.field("a", "attempts") == "3"


async def test_suspect_whose_charge_was_taken_back_is_acquitted_by_a_token_as_ever(bench: QueueBench) -> None:
    first, second, third = [await bench.worker(name) for name in ("first", "second", "third")]
    job = await passed_on(bench, await bench.one(first), first, second)
    taken = await passed_on(bench, job, second, third)
    await second.renew([job], {})

    await publish(third, taken, 0, 1)

    assert await bench.field("a", "attempts") == "0"
    assert await bench.redis.hget(bench.keys.worker("third"), "trial") is None


async def test_workers_that_were_only_frozen_never_make_a_dead_letter(bench: QueueBench) -> None:
    workers = [await bench.worker(f"w{n}") for n in range(2 * MAX_ATTEMPTS)]
    job = await bench.one(workers[0])
    for owner, heir in pairwise(workers):
        old, job = job, await passed_on(bench, job, owner, heir)
        await owner.renew([old], {})
    assert int(await bench.field("a", "attempts") or 0) < MAX_ATTEMPTS
    assert await bench.letters() == []
