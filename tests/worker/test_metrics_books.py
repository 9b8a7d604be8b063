"""Several workers, and whatever can happen to a job: the counts of all of them agree with the jobs."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from gllm.protocol import Error
from tests.servers import binaries, require
from tests.worker.fake_engine import FakeEngine
from tests.worker.metrics_page import samples
from tests.worker.queue_bench import now_ms
from tests.worker.service_bench import ServiceBench, Worker
from worker.queue import Claimed, Queue
from worker.rows import Answer

pytestmark = pytest.mark.parametrize("server_kind", require(binaries())[:1], indirect=True)  # one is enough here
LONG = {"prompt": "hello", "max_tokens": 4000}
Release = Callable[[Queue, list[Claimed], frozenset[str]], Awaitable[list[Answer]]]


def counted(workers: list[Worker], name: str) -> float:
    """A number of all workers together."""
    return sum(samples(worker.service.metrics).get(name, 0) for worker in workers)


def outcomes(workers: list[Worker]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for worker in workers:
        for name, value in samples(worker.service.metrics).items():
            if name.startswith("gllm_jobs_total") and value:
                found[name.split('"')[1]] += int(value)
    return dict(found)


def balanced(worker: Worker) -> None:
    """Whatever a worker has claimed has ended there, was taken from it, was handed back, or is still there."""
    found = samples(worker.service.metrics)
    left = found["gllm_jobs_active"] + found["gllm_jobs_released_total"]
    gone = found['gllm_recoveries_total{path="fenced"}']
    assert found["gllm_jobs_claimed_total"] == found["gllm_job_seconds_count"] + gone + left
    assert not [(name, value) for name, value in found.items() if not value >= 0]
    assert found["gllm_metrics_errors_total"] == 0


async def test_counts_of_many_workers_agree_with_the_jobs(crew: ServiceBench) -> None:
    first = await crew.start(engine=FakeEngine(step_seconds=0.001))
    replies = {}
    for number in range(5):
        await crew.submit(f"short{number}", max_tokens=number + 1)
    await crew.bench.submit("invalid", body="{")
    await crew.bench.submit("malformed", body=json.dumps(LONG), deadline="soon")
    await crew.submit("large", prompt="x" * 5000)
    first.engine.refuse["refused"] = ("invalid", "tokens: no")
    await crew.submit("refused")
    await crew.submit("overdue", entry={"deadline": await now_ms(crew.bench.redis) - 1})
    await crew.bench.redis.set(crew.bench.keys.cancel("unwanted"), 1, ex=60)
    await crew.submit("unwanted")
    ended = [*(f"short{n}" for n in range(5)), "invalid", "malformed", "large", "refused", "overdue", "unwanted"]
    for name in ended:
        replies[name] = await crew.reply(name)
    await crew.submit("short0")  # a duplicate

    await crew.submit("orphan", **LONG)
    await crew.published("orphan", 3)
    await first.kill()
    second = await crew.start(engine=FakeEngine(step_seconds=0.001), grace=0.05)
    await crew.published("orphan", 30)
    await crew.submit("fenced", **LONG)
    await crew.published("fenced", 3)
    await crew.bench.redis.hincrby(crew.bench.keys.job("fenced"), "epoch", 1)
    await crew.until(lambda: [job.id for job in second.jobs] == ["orphan"], "the fence")
    await second.stop()  # releases what does not end within the grace time

    third = await crew.start(engine=FakeEngine(step_seconds=0.001))
    await crew.until(lambda: {job.id for job in third.jobs} == {"orphan", "fenced"}, "both jobs at the third worker")
    for name in ("orphan", "fenced"):
        await crew.bench.redis.set(crew.bench.keys.cancel(name), 1, ex=60)
        replies[name] = await crew.reply(name)
    await crew.until(lambda: not third.jobs, "the end of all jobs")

    for worker in crew.workers:
        balanced(worker)
    assert outcomes(crew.workers) == Counter(
        reply.end.code if isinstance(reply.end, Error) else reply.end.finish_reason for reply in replies.values()
    )
    with_tokens = [reply for reply in replies.values() if reply.ids]
    assert counted(crew.workers, "gllm_time_to_first_token_seconds_count") == len(with_tokens)
    assert counted(crew.workers, "gllm_queue_wait_seconds_count") == len(replies) - 3, "three ended while claimed"
    assert counted(crew.workers, 'gllm_dead_letters_total{reason="malformed"}') == len(await crew.bench.letters()) == 1
    paths = {
        path: counted(crew.workers, f'gllm_recoveries_total{{path="{path}"}}')
        for path in ("redelivered", "resumed", "released", "duplicate", "fenced", "dead_letter")
    }
    assert paths == {"redelivered": 2, "resumed": 3, "released": 1, "duplicate": 1, "fenced": 1, "dead_letter": 1}
    assert counted([third], "gllm_jobs_active") == counted([third], 'gllm_queue_depth{priority="normal"}') == 0


async def test_dead_letters_are_counted_by_reason(crew: ServiceBench) -> None:
    """One of a reply that cannot be written, one of a malformed entry, and one that cannot itself be written."""
    worker = await crew.start(engine=FakeEngine(step_seconds=0.001))
    await crew.submit("unwritable", **LONG)
    await crew.published("unwritable", 3)
    await crew.bench.redis.set(crew.bench.keys.out("unwritable"), "in the way", ex=60)
    await crew.bench.submit("malformed", deadline="soon")
    await crew.reply("malformed")
    await crew.until(lambda: counted([worker], 'gllm_dead_letters_total{reason="unpublishable"}') == 1, "the letter")
    assert sorted(letter[b"reason"] for letter in await crew.bench.letters()) == [b"malformed", b"unpublishable"]

    await crew.bench.redis.delete(crew.bench.keys.dead)
    await crew.bench.redis.set(crew.bench.keys.dead, "no stream")
    await crew.bench.submit("again", deadline="soon")
    await crew.reply("again")
    await crew.until(lambda: counted([worker], 'gllm_dead_letters_total{reason="unwritten"}') == 1, "its count")
    assert counted([worker], 'gllm_dead_letters_total{reason="malformed"}') == 1
    assert counted([worker], 'gllm_recoveries_total{path="dead_letter"}') == 3
    await crew.bench.redis.delete(crew.bench.keys.dead)


async def handed_back(crew: ServiceBench, monkeypatch: pytest.MonkeyPatch, release: Release) -> tuple[float, float]:
    """How many jobs a worker counts as released and as fenced that drains with one, and hands it back so."""
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01), lease=30.0, grace=0.05)
    await crew.submit("a", **LONG)
    await crew.published("a", 3)
    monkeypatch.setattr(Queue, "release", release)
    await worker.stop()
    balanced(worker)
    found = samples(worker.service.metrics)
    return found["gllm_jobs_released_total"], found['gllm_recoveries_total{path="fenced"}']


async def test_job_that_is_renewed_in_vain_while_it_is_handed_back_is_released_and_not_fenced(
    crew: ServiceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Queue.release

    async def overtaken(self: Queue, jobs: list[Claimed], charged: frozenset[str]) -> list[Answer]:
        answers = await real(self, jobs, charged)
        running = crew.workers[0].service.running
        assert running is not None
        await running._lease._turn()  # its answer comes before that of the release
        return answers

    assert await handed_back(crew, monkeypatch, overtaken) == (1, 0)


async def test_job_that_is_anothers_when_it_is_handed_back_is_fenced_and_not_released(
    crew: ServiceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Queue.release

    async def late(self: Queue, jobs: list[Claimed], charged: frozenset[str]) -> list[Answer]:
        await crew.bench.redis.hincrby(crew.bench.keys.job("a"), "epoch", 1)
        return await real(self, jobs, charged)

    assert await handed_back(crew, monkeypatch, late) == (0, 1)
