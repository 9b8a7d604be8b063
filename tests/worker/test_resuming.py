"""What `start` and `resume` say when a job changes hands, and what its usage counts in the end."""

import asyncio

import pytest

from gllm.protocol import Done, Resume
from tests.servers import first_kind
from tests.worker.fake_engine import FakeEngine, script, text_of
from tests.worker.service_bench import Reply, ServiceBench

HELLO = [3 + byte for byte in b"hello"]


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough here: nothing depends on it."""
    return first_kind()


async def taken_over(crew: ServiceBench, first: FakeEngine, second: FakeEngine, published: int = 10) -> Reply:
    """A reply that a second engine goes on with, after the first has published so many tokens."""
    worker = await crew.start(engine=first)
    await crew.submit("a", max_tokens=60)
    if published:
        await crew.published("a", published)
    else:
        await crew.until_async(lambda: crew.bench.redis.exists(crew.bench.keys.out("a")), "the start of the reply")
    await worker.kill()
    await crew.start(engine=second)
    reply = await crew.reply("a")
    assert reply.ids == script(HELLO, 60)
    return reply


async def test_job_that_was_started_and_has_no_token_is_resumed_from_0(crew: ServiceBench) -> None:
    reply = await taken_over(crew, FakeEngine(tokens_per_step=0), FakeEngine(), published=0)

    assert reply.start is not None
    (resume,) = reply.resumes
    assert (resume.first, resume.exact, resume.attempt) == (0, True, 2)
    assert reply.events[1] == resume


@pytest.mark.parametrize(
    ("first", "second", "exact"),
    [
        ({}, {}, True),
        ({"numerics": "a CPU"}, {"numerics": "another one"}, False),
        ({"deterministic": False}, {"deterministic": False}, False),
    ],
    ids=["the same", "other numerics", "not deterministic"],
)
async def test_resume_is_exact_between_engines_that_compute_alike(
    crew: ServiceBench, first: dict[str, object], second: dict[str, object], exact: bool
) -> None:
    reply = await taken_over(crew, FakeEngine(step_seconds=0.01, **first), FakeEngine(**second))

    assert [resume.exact for resume in reply.resumes] == [exact]
    assert reply.resumes[0].first >= 10


async def test_reply_whose_record_is_gone_is_resumed_from_what_it_tells_itself(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=60)
    await crew.published("a", 10)
    await worker.kill()
    await crew.bench.redis.delete(crew.bench.keys.job("a"))
    await crew.start(engine=FakeEngine(cached_tokens=5))

    reply = await crew.reply("a")

    (resume,) = reply.resumes
    assert (resume.first >= 10, resume.exact, resume.attempt) == (True, True, 1)
    assert isinstance(reply.end, Done)
    assert reply.end.usage.cached_tokens == 2


async def test_resume_is_not_exact_when_nobody_knows_who_made_the_published_tokens(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=60)
    await crew.published("a", 10)
    await worker.kill()
    await crew.bench.redis.delete(crew.bench.keys.out("a"))
    await crew.start()
    await crew.until_ended("a")

    resume, *_, end = await crew.bench.events("a")
    assert isinstance(resume, Resume)
    assert (resume.first >= 10, resume.exact) == (True, False)
    assert isinstance(end, Done)
    assert end.usage.completion_tokens == 60


async def test_usage_counts_what_was_published_also_when_it_is_not_generated_again(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=4000)
    await crew.published("a", 10)
    await worker.kill()
    published = int(await crew.bench.field("a", "n") or 0)
    await crew.bench.redis.delete(crew.bench.keys.out("a"))
    second = await crew.start(engine=FakeEngine(tokens_per_step=0))
    await crew.until(lambda: second.engine.added, "the job in the second engine")
    await crew.bench.redis.set(crew.bench.keys.cancel("a"), 1, ex=60)
    await crew.until_ended("a")

    end = (await crew.bench.events("a"))[-1]
    assert isinstance(end, Done)
    assert (end.finish_reason, end.usage.completion_tokens) == ("cancelled", published)


async def test_usage_is_that_of_the_whole_reply_and_cached_tokens_that_of_its_first_start(crew: ServiceBench) -> None:
    reply = await taken_over(crew, FakeEngine(step_seconds=0.01), FakeEngine(cached_tokens=5))

    assert isinstance(reply.end, Done)
    usage = reply.end.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 60, 2)


async def test_killed_worker_is_resumed_without_gap_or_repetition(crew: ServiceBench) -> None:
    first = await crew.start()
    await crew.submit("a", max_tokens=600, logprobs=0)
    await crew.published("a", 20)
    await first.kill()
    second = await crew.start()

    reply = await crew.reply("a")

    assert reply.ids == script(HELLO, 600)
    assert reply.text == text_of(reply.ids)
    assert [item.id for event in reply.events for item in getattr(event, "logprobs", None) or []] == reply.ids
    (resume,) = reply.resumes
    assert (resume.worker, resume.attempt, resume.exact) == (second.service.name, 2, True)
    assert resume.first >= 20
    assert isinstance(reply.end, Done)
    assert (reply.end.usage.completion_tokens, reply.end.usage.cached_tokens) == (600, 2)
    await crew.bench.clear_streams()


async def test_resume_may_finish_without_a_step(crew: ServiceBench) -> None:
    first = await crew.start()
    await crew.submit("a", max_tokens=8)
    await _hold_back_the_end(crew, first)
    second = await crew.start()

    reply = await crew.reply("a")

    assert reply.ids == script(HELLO, 8)
    assert isinstance(reply.end, Done)
    assert reply.end.finish_reason == "length"
    assert second.engine.added == []


async def _hold_back_the_end(crew: ServiceBench, worker: object) -> None:
    """All tokens are published, the terminal event is not, and the worker is dead."""
    from worker.queue import Queue

    async def never(self: Queue, rows: object) -> list[object]:
        await asyncio.Event().wait()
        return []

    original = Queue.finish
    Queue.finish = never  # type: ignore[assignment,method-assign]
    try:
        await crew.published("a", 8)
        await worker.kill()  # type: ignore[attr-defined]
    finally:
        Queue.finish = original  # type: ignore[method-assign]


async def test_zombie_that_wakes_up_is_fenced_and_drops_the_job(crew: ServiceBench) -> None:
    zombie = await crew.start(engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=200)
    await crew.published("a", 3)
    await crew.bench.redis.hincrby(crew.bench.keys.job("a"), "epoch", 1)  # somebody took it over

    await crew.until(lambda: "a" in zombie.engine.cancelled, "the zombie to drop the job")

    assert zombie.ready
    await crew.bench.redis.hset(crew.bench.keys.job("a"), "worker", "gone")
