"""Jobs that end at the claim or the finish: what stays of them, for how long, and what their readers are told."""

from gllm.protocol import Done, Start, Usage, encode_event
from tests.worker.queue_bench import QueueBench, finish, publish
from worker.backlog import Backlog
from worker.queue import Queue
from worker.rows import AppendRow


async def ids(bench: QueueBench, worker: Queue) -> list[str]:
    return [job.id for job in await bench.claimed(worker)]


async def test_lives_of_a_record_and_a_reply_after_the_end(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await publish(worker, job, 0, 1)
    await finish(worker, job, 1)

    assert 590_000 < await bench.redis.pttl(bench.keys.out("a")) <= 600_000
    assert 86_390_000 < await bench.redis.pttl(bench.keys.job("a")) <= 86_400_000


async def test_released_jobs_count_as_waiting_and_the_bell_is_read_on_from_its_last_ring(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    for _ in range(2):
        await worker.release([job])
        (job,) = await bench.claimed(worker)
    await worker.release([job])
    ((last, _),) = await bench.redis.xrange(bench.keys.bell)  # one entry, however often it is rung

    reply = await worker.claim(0, ())

    assert reply.waiting["normal"] == Backlog(waiting=1, new=0)
    assert reply.positions[bench.keys.bell] == last.decode()


async def test_job_that_ends_before_it_goes_on_is_told_what_it_used(bench: QueueBench) -> None:
    first, second = await bench.worker("first"), await bench.worker("second")
    job = await bench.one(first)
    start = Start(worker="first", attempt=1, numerics="x", prompt_tokens=3, cached_tokens=2)
    await first.append([AppendRow("mark", "a", job.epoch, 0, 0, encode_event(start), 2)])
    await publish(first, job, 0, 4)
    await bench.redis.set(bench.keys.cancel("a"), 1, ex=86400)
    await bench.die(first)

    assert await ids(bench, second) == []
    end = (await bench.events("a"))[-1]
    assert isinstance(end, Done)
    assert end.usage == Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=4)
    assert 0 < end.timings.queue < 10
    assert await bench.field("a", "epoch") == str(job.epoch + 1)
