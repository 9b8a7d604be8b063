"""The publisher: what is flushed when, repairs after a failover, and errors of single replies."""

import asyncio
import subprocess
import sys

import pytest

from gllm.protocol import Done, Error, Tokens
from tests.servers import first_kind
from tests.worker.fake_engine import FakeEngine, script, text_of
from tests.worker.queue_bench import QueueBench, tokens
from tests.worker.service_bench import ServiceBench
from worker.queue import Queue

HELLO = [3 + byte for byte in b"hello"]


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough here: what depends on the server is tested with the scripts and the outages."""
    return first_kind()


async def test_first_token_is_alone_and_at_once_and_later_ones_are_merged_under_load(
    crew: ServiceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Queue.append

    async def slow(self: Queue, rows: object) -> object:
        await asyncio.sleep(0.005)  # a loaded server
        return await real(self, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(Queue, "append", slow)
    await crew.start(engine=FakeEngine(step_seconds=0.001))
    await crew.submit("a", max_tokens=300)

    reply = await crew.reply("a")

    entries = [event for event in reply.events if isinstance(event, Tokens)]
    assert len(entries[0].ids) == 1
    assert reply.ids == script(HELLO, 300)
    assert len(entries) < 60  # a flush takes 5 ms, so about 20 ms of tokens share one


async def test_tokens_of_an_idle_server_do_not_wait_for_others(crew: ServiceBench) -> None:
    await crew.start(engine=FakeEngine(step_seconds=0.05))
    await crew.submit("a", max_tokens=10)

    reply = await crew.reply("a")

    assert [len(event.ids) for event in reply.events if isinstance(event, Tokens)] == [1] * 10


async def test_all_jobs_of_a_step_share_one_call(crew: ServiceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = Queue.append

    async def counting(self: Queue, rows: list[object]) -> object:
        calls.append(len(rows))
        return await real(self, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(Queue, "append", counting)
    for n in range(8):
        await crew.submit(f"j{n}", max_tokens=20)
    await crew.start(engine=FakeEngine(step_seconds=0.03))
    for n in range(8):
        await crew.reply(f"j{n}")

    assert max(calls) >= 8
    assert len(calls) < 8 * 20


async def test_record_set_back_in_the_middle_is_repaired_from_the_workers_own_tokens(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.005))
    await crew.submit("a", max_tokens=300, logprobs=0)
    await crew.published("a", 20)
    record = await crew.bench.redis.dump(crew.bench.keys.job("a"))
    await crew.published("a", 60)
    await crew.bench.redis.restore(crew.bench.keys.job("a"), 60_000, record, replace=True)

    reply = await _after_repairs(crew, "a")

    assert reply == (script(HELLO, 300), text_of(script(HELLO, 300)))
    text = worker.service.metrics.render().decode()
    assert 'gllm_recoveries_total{path="repaired"} 0.0' not in text


async def test_record_and_reply_set_back_together_leave_no_hole(crew: ServiceBench) -> None:
    await crew.start(engine=FakeEngine(step_seconds=0.005))
    await crew.submit("a", max_tokens=300)
    await crew.published("a", 20)
    keys = [crew.bench.keys.job("a"), crew.bench.keys.out("a")]
    copies = [await crew.bench.redis.dump(key) for key in keys]
    await crew.published("a", 60)
    async with crew.bench.redis.pipeline(transaction=True) as both:  # a failover sets everything back to one moment
        for key, copy in zip(keys, copies, strict=True):
            both.restore(key, 60_000, copy, replace=True)
        await both.execute()

    assert await _after_repairs(crew, "a") == (script(HELLO, 300), text_of(script(HELLO, 300)))


async def _after_repairs(crew: ServiceBench, job_id: str) -> tuple[list[int], str]:
    """The reply as a client joins it: what an event repeats is dropped."""
    await crew.until_ended(job_id)
    ids: list[int] = []
    text = ""
    for event in await crew.bench.events(job_id):
        if isinstance(event, Tokens):
            assert event.first <= len(ids), "a hole"
            assert event.ids[: len(ids) - event.first] == ids[event.first : event.first + len(event.ids)]
            ids += event.ids[len(ids) - event.first :]
            text += event.text[len(text) - event.at :]
        elif isinstance(event, Done):
            text += event.text
    return ids, text


async def test_reply_that_vanishes_is_written_on_and_expires(crew: ServiceBench) -> None:
    await crew.start(engine=FakeEngine(step_seconds=0.005))
    await crew.submit("a", max_tokens=200)
    await crew.published("a", 20)
    await crew.bench.redis.delete(crew.bench.keys.out("a"))
    await crew.until_ended("a")

    assert await crew.bench.redis.ttl(crew.bench.keys.out("a")) > 0
    events = await crew.bench.events("a")
    assert isinstance(events[0], Tokens)
    assert events[0].first >= 20


async def test_reply_key_of_another_type_ends_the_job_with_a_dead_letter(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=4000)
    await crew.submit("good", max_tokens=100)
    await crew.published("a", 3)
    await crew.bench.redis.set(crew.bench.keys.out("a"), "no stream", ex=60)

    async def ended() -> bool:
        return await crew.bench.field("a", "state") == "ended"

    await crew.until_async(ended, "the end of the job")
    (letter,) = await crew.bench.letters()
    assert letter[b"reason"] == b"unpublishable"
    assert len((await crew.reply("good")).ids) == 100
    assert worker.ready
    await crew.bench.clear_streams()


@pytest.mark.parametrize("tokens_before", [0, 3])
async def test_reply_key_that_breaks_in_the_step_that_ends_the_job_does_not_keep_the_worker_trying(
    crew: ServiceBench, tokens_before: int
) -> None:
    worker = await crew.start(engine=FakeEngine(tokens_per_step=tokens_before or 50))
    worker.engine.go.clear()
    await crew.submit("a", max_tokens=50)
    await crew.until(lambda: worker.engine.added, "the job in the engine")
    if tokens_before:
        worker.engine.go.set()
        await crew.published("a", tokens_before)
        worker.engine.go.clear()
        worker.engine._per_step = 50
    await crew.bench.redis.set(crew.bench.keys.out("a"), "no stream", ex=60)
    worker.engine.go.set()

    await crew.until_async(crew.bench.letters, "the dead letter")
    await crew.until(lambda: not worker.jobs, "the end of the job")
    assert await crew.bench.field("a", "state") == "ended"
    await crew.bench.clear_streams()


async def test_worker_that_hears_of_more_tokens_than_it_has_made_leaves_the_job_to_whoever_made_them(
    crew: ServiceBench,
) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.005))
    await crew.submit("a", max_tokens=300)
    await crew.published("a", 10)
    await crew.bench.redis.hset(crew.bench.keys.job("a"), "n", 4000)
    await crew.until(lambda: "a" in worker.engine.cancelled, "the job to be dropped")

    reply = await crew.reply("a")  # taken up again after a lease, from what the reply really holds

    assert reply.ids == script(HELLO, 300)
    assert len(reply.resumes) == 1


async def test_prompt_logprobs_come_once_with_the_first_tokens_or_at_the_end(crew: ServiceBench) -> None:
    await crew.start(engine=FakeEngine(prompt_logprobs=True))
    await crew.submit("a", max_tokens=4, prompt_logprobs=0)
    await crew.submit("none", max_tokens=0, prompt_logprobs=0)

    with_tokens, without = await crew.reply("a"), await crew.reply("none")

    carried = [event.prompt_logprobs for event in with_tokens.events if isinstance(event, Tokens)]
    assert [item and len(item) for item in carried] == [5, *[None] * (len(carried) - 1)]
    assert isinstance(without.end, Done)
    assert without.end.prompt_logprobs is not None
    assert without.end.prompt_logprobs[0] is None
    assert without.ids == []


async def test_minus_infinity_is_written_as_a_number(crew: ServiceBench) -> None:
    await crew.start(engine=FakeEngine(logprob=float("-inf")))
    await crew.submit("a", logprobs=1)

    reply = await crew.reply("a")

    first = next(event for event in reply.events if isinstance(event, Tokens))
    assert first.logprobs is not None
    assert first.logprobs[0].logprob == -9999.0
    assert not isinstance(reply.end, Error)


async def test_wish_to_cancel_one_job_of_a_flush_is_told_for_that_job_alone(bench: QueueBench) -> None:
    queue = await bench.worker()
    for job_id in ("a", "b", "c"):
        await bench.submit(job_id)
    jobs = await bench.claimed(queue)
    await bench.redis.set(bench.keys.cancel("b"), 1, ex=60)

    answers = await queue.append([tokens(job, 0, 1) for job in jobs])

    assert {job.id: answer.status for job, answer in zip(jobs, answers, strict=True)} == {
        "a": "OK",
        "b": "CANCEL",
        "c": "OK",
    }
    assert [await bench.field(job.id, "n") for job in jobs] == ["1", "1", "1"]


async def test_rows_beyond_one_look_at_the_wishes_are_published_and_one_is_cancelled(bench: QueueBench) -> None:
    """More rows than the script asks about at a time, also than Lua's stack holds."""
    queue = await bench.worker()
    job = await bench.one(queue)
    await bench.redis.set(bench.keys.cancel("a"), 1, ex=60)
    strangers = [tokens(job, 0, 1)._replace(id=f"stranger-{n}") for n in range(9000)]

    answers = await queue.append([*strangers, tokens(job, 0, 1)])

    assert [answer.status for answer in answers] == ["FENCED"] * 9000 + ["CANCEL"]


def test_garbage_collector_of_a_worker_process_leaves_its_modules_alone() -> None:
    """To look through them takes 40 ms, in which no stream goes on."""
    code = """
import gc
from worker import service
async def look(settings):
    return gc.get_freeze_count(), False
service._run = look
print(service.run(None))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000
