"""The publisher: what is flushed when, repairs after a failover, and errors of single replies."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from gllm.protocol import Done, Error, Tokens
from tests.servers import first_kind
from tests.worker.fake_engine import FakeEngine, script, text_of
from tests.worker.queue_bench import QueueBench, tokens, until
from tests.worker.service_bench import ServiceBench
from worker import publisher
from worker.health import Health
from worker.link import Link
from worker.metrics import Metrics
from worker.publisher import Publisher
from worker.queue import Queue
from worker.scripts import Answer, AppendRow, FinishRow

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


class Stub:
    """A job as the publisher sees it: `n` tokens, `written` of them in Redis; the end of it when `ended` is set."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.n = self.done = 0
        self.ended = False

    @property
    def urgent(self) -> bool:
        return self.ended or self.done == 0

    @property
    def lacking(self) -> bool:
        return self.n > self.done

    def rows(self) -> list[AppendRow]:
        return [AppendRow("tokens", self.id, 1, self.done, self.n, b"")] if self.lacking else []

    def finish_row(self) -> FinishRow | None:
        return FinishRow(self.id, 1, self.n, "s", "1-0", b"") if self.ended else None

    def written(self, row: AppendRow) -> None:
        self.done = row.to


class Flushes:
    """A publisher over a queue whose every append takes `seconds`; `calls`: when each began, and the rows by id."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls: list[tuple[float, dict[str, int]]] = []
        self.finished: list[str] = []
        link = Link(Health(), Metrics())
        link.restored()
        self.publisher = Publisher(self, link, self)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.publisher.run())

    async def append(self, rows: list[AppendRow]) -> list[Answer]:
        self.calls.append((time.monotonic(), {row.id: row.to - row.first for row in rows}))
        await asyncio.sleep(self.seconds)
        return [Answer("OK", row.to) for row in rows]

    async def finish(self, rows: list[FinishRow]) -> list[Answer]:
        self.finished += [row.id for row in rows]
        return [Answer("OK", row.n) for row in rows]

    def has(self, job: Stub) -> bool:
        return job.id not in self.finished

    def published(self, job: Stub) -> None:
        pass

    def buried(self, job: Stub) -> None:
        pass

    def ended(self, job: Stub) -> None:
        pass

    def token(self, job: Stub) -> None:
        job.n += 1
        self.publisher.changed(job)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async def met() -> bool:
            return condition()

        await until(met, what)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_flushes_fill_half_of_the_time_and_what_comes_meanwhile_shares_an_entry() -> None:
    flushes, job = Flushes(0.01), Stub("a")
    began = time.monotonic()
    while job.n < 60:
        flushes.token(job)
        await asyncio.sleep(0.002)
    elapsed = time.monotonic() - began
    await flushes.stop()

    sizes = [rows["a"] for _, rows in flushes.calls]
    assert sizes[0] == 1
    assert max(sizes) > 3
    assert len(sizes) <= elapsed / (2 * 0.01) + 2


async def test_no_flush_is_put_off_beyond_the_bound_however_long_the_one_before_took() -> None:
    flushes, job = Flushes(1.0), Stub("a")
    flushes.token(job)
    await flushes.until(lambda: job.done == 1, "the first token")
    flushes.token(job)
    await flushes.until(lambda: len(flushes.calls) == 2, "the second one")
    await flushes.stop()

    (first, _), (second, _) = flushes.calls
    assert 1.0 <= second - first < 1.9  # twice the flush would have been 2.0


async def test_first_tokens_and_ends_do_not_wait_and_take_no_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MERGE_FACTOR", 10_000)
    monkeypatch.setattr(publisher, "MERGE_SECONDS", 300.0)
    flushes, old, new = Flushes(0.03), Stub("old"), Stub("new")
    flushes.token(old)
    await flushes.until(lambda: old.done == 1, "the first token of all")
    flushes.token(old)  # from here on nothing but what is urgent is written for five minutes
    flushes.token(new)
    await flushes.until(lambda: new.done == 1, "the first token of the other job")
    old.ended = True
    flushes.token(old)
    await flushes.until(lambda: bool(flushes.finished), "the end")
    await flushes.stop()

    assert [rows for _, rows in flushes.calls] == [{"old": 1}, {"new": 1}, {"old": 2}]
    assert flushes.finished == ["old"]


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
    for key, copy in zip(keys, copies, strict=True):
        await crew.bench.redis.restore(key, 60_000, copy, replace=True)

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
