"""The worker from claim to terminal event: replies, bad jobs, suspects, tenants, refusals at the start."""

import time

import pytest

from engine.request import Request
from gllm.protocol import Done, Error
from tests.worker.fake_engine import FakeEngine, Refusal, script, text_of
from tests.worker.queue_bench import until
from tests.worker.service_bench import ServiceBench
from worker.bridge import EngineRefused
from worker.service import REFUSED

HELLO = [3 + byte for byte in b"hello"]


async def test_reply_has_every_token_once_with_text_usage_and_timings(crew: ServiceBench) -> None:
    worker = await crew.start()
    await crew.submit("a", logprobs=0)

    reply = await crew.reply("a")

    assert reply.ids == script(HELLO, 8)
    assert reply.text == text_of(reply.ids)
    assert isinstance(reply.end, Done)
    assert (reply.end.finish_reason, reply.end.stop) == ("length", None)
    usage = reply.end.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (5, 2, 8)
    assert reply.start is not None
    assert (reply.start.worker, reply.start.attempt, reply.start.prompt_tokens) == (worker.service.name, 1, 5)
    assert reply.end.timings.first_token is not None
    assert reply.end.timings.total >= reply.end.timings.first_token
    await crew.bench.clear_streams()


async def test_many_jobs_at_once_keep_their_tokens_apart(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(max_sequences=16))
    for n in range(100):
        await crew.submit(f"j{n}", prompt=f"prompt {n}", max_tokens=5 + n % 20)

    for n in range(100):
        reply = await crew.reply(f"j{n}")
        assert reply.ids == script([3 + byte for byte in f"prompt {n}".encode()], 5 + n % 20)
    assert max(len(request.tokens) for request in worker.engine.added) < 20
    await crew.bench.clear_streams()


async def test_chat_stop_string_and_logprobs(crew: ServiceBench) -> None:
    await crew.start()
    await crew.submit("chat", prompt=None, messages=[{"role": "user", "content": "hi"}])
    full = script(HELLO, 30)
    await crew.submit("stop", stop=text_of(full[4:6]), max_tokens=30, logprobs=0)

    chat, stopped = await crew.reply("chat"), await crew.reply("stop")

    assert isinstance(chat.end, Done)
    assert len(chat.ids) == 8
    assert isinstance(stopped.end, Done)
    assert (stopped.end.finish_reason, stopped.end.stop) == ("stop", text_of(full[4:6]))
    assert (stopped.ids, stopped.text) == (full[:6], text_of(full[:4]))
    logprobs = [item for event in stopped.events for item in getattr(event, "logprobs", None) or []]
    assert [item.id for item in logprobs] == full[:6]


BAD_BODIES = {
    "not json": ("{", "invalid", "body"),
    "unknown field": ('{"prompt":"x","max_tokns":4}', "invalid", "max_tokns"),
    "wrong type": ('{"prompt":"x","max_tokens":"5"}', "invalid", "max_tokens"),
    "empty prompt": ('{"prompt":""}', "invalid", "prompt"),
    "empty ids": ('{"token_ids":[]}', "invalid", "token_ids"),
    "id out of range": ('{"token_ids":[99999]}', "invalid", "99999"),
    "prompt too long": ('{"prompt":"' + "x" * 5000 + '"}', "too_large", "4096"),
    "nothing to do": ("{}", "invalid", "prompt"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_refused_job_gets_exactly_one_error_beside_running_neighbours(crew: ServiceBench, name: str) -> None:
    body, code, word = BAD_BODIES[name]
    worker = await crew.start()
    await crew.submit("before")
    await crew.bench.submit("bad", body=body)
    await crew.submit("after")

    bad = await crew.reply("bad")

    assert isinstance(bad.end, Error)
    assert (bad.end.code, bad.events) == (code, [bad.end])
    assert word in bad.end.message
    assert [(await crew.reply(name)).ids for name in ("before", "after")] == [script(HELLO, 8)] * 2
    assert "bad" not in [request.id for request in worker.engine.added]
    await crew.bench.clear_streams()


@pytest.mark.parametrize(
    ("refusal", "error", "code"),
    [
        ("invalid", "seed: too big", "invalid"),
        ("too_large", "tokens: never fit", "too_large"),
        (None, "nan logits", "internal"),
        (None, "invalid: as the text of an error may begin", "internal"),
    ],
)
async def test_engine_can_refuse_a_job(crew: ServiceBench, refusal: Refusal, error: str, code: str) -> None:
    engine = FakeEngine()
    engine.refuse["a"] = refusal, error
    await crew.start(engine=engine)
    await crew.submit("a")

    reply = await crew.reply("a")

    assert isinstance(reply.end, Error)
    assert (reply.end.code, reply.end.message) == (code, error)
    await crew.bench.clear_streams()


async def test_intake_that_crashes_ends_only_its_job(crew: ServiceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.intake import Intake

    await crew.start()
    real = Intake.prepare

    def prepare(self: Intake, job: object, *rest: object) -> object:
        if getattr(job, "prompt", "") == "boom":
            raise MemoryError("no")
        return real(self, job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Intake, "prepare", prepare)
    await crew.submit("bad", prompt="boom")
    await crew.submit("good")

    bad, good = await crew.reply("bad"), await crew.reply("good")

    assert isinstance(bad.end, Error)
    assert bad.end.code == "internal"
    assert len(good.ids) == 8


async def test_engine_that_refuses_to_start_is_an_error_before_any_job_is_claimed(crew: ServiceBench) -> None:
    engine = FakeEngine()
    engine.refuse_start = EngineRefused("weights: model.safetensors is cut off")
    await crew.submit("a")
    worker = await crew.start(engine=engine, wait=False)

    assert await worker.task == REFUSED
    assert "cut off" in worker.service.health.reason
    assert await crew.bench.field("a", "state") is None


async def test_worker_with_another_model_refuses_to_join(crew: ServiceBench) -> None:
    await crew.start(digest="one")
    await crew.submit("a", max_tokens=4)
    await crew.reply("a")
    other = await crew.start(digest="two", wait=False)

    assert await other.task == REFUSED
    assert "'one'" in other.service.health.reason
    assert "'two'" in other.service.health.reason


async def test_taken_metrics_port_is_an_error_that_names_it(crew: ServiceBench) -> None:
    first = await crew.start()
    assert first.service.address is not None
    port = first.service.address.port
    second = await crew.start(metrics_port=port, wait=False)

    assert await second.task == REFUSED
    assert str(port) in second.service.health.reason


async def test_full_engine_leaves_jobs_in_redis_for_others(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(max_sequences=2, step_seconds=0.01))
    for n in range(6):
        await crew.submit(f"j{n}", max_tokens=4000)
    await crew.published("j1", 3)

    async def pending() -> int:
        return await crew.bench.pending()

    assert await pending() == 2
    assert await crew.bench.redis.xlen(crew.bench.keys.jobs("normal", 0)) == 6
    assert sorted(request.id for request in worker.engine.added) == ["j0", "j1"]


async def test_suspect_is_marked_to_be_stepped_alone(crew: ServiceBench) -> None:
    first = await crew.start()
    first.engine.go.clear()
    await crew.submit("a")
    await crew.until(lambda: first.engine.added, "the job in the engine")
    await first.kill()
    second = await crew.start()

    await crew.reply("a")

    request: Request = second.engine.added[0]
    assert (request.id, request.isolate) == ("a", True)


async def test_many_suspects_clear_in_a_moment(crew: ServiceBench) -> None:
    engine = FakeEngine(max_sequences=32)
    engine.go.clear()
    for n in range(16):
        await crew.submit(f"j{n}")
    first = await crew.start(engine=engine)
    await crew.until(lambda: len(first.engine.added) == 16, "the jobs in the engine")
    await first.kill()
    second = await crew.start(engine=FakeEngine(max_sequences=32))
    await crew.until(lambda: second.engine.added, "the first trial")
    began = time.monotonic()

    for n in range(16):
        assert (await crew.reply(f"j{n}")).ids == script(HELLO, 8)
    assert time.monotonic() - began < 5


async def test_tenants_that_are_no_text_are_refused_and_never_become_one(crew: ServiceBench) -> None:
    worker = await crew.start()
    await crew.submit("a", entry={"tenant": b"\xff"})
    await crew.submit("b", entry={"tenant": b"\xfe"})
    await crew.submit("good", entry={"tenant": "ü"})

    ends = [(await crew.reply(job_id)).end for job_id in ("a", "b")]
    await crew.reply("good")

    assert [end.code for end in ends if isinstance(end, Error)] == ["invalid"] * 2
    assert [end.message for end in ends if isinstance(end, Error)] == [
        f"tenant: UTF-8 expected, got '\\udc{byte}'" for byte in ("ff", "fe")
    ]
    assert [request.tenant for request in worker.engine.added] == ["ü"]


async def test_queue_depth_follows_the_queue_while_the_worker_is_full(crew: ServiceBench) -> None:
    """A full worker does not claim; the depth that calls for another worker must not wait for its next claim."""
    engine = FakeEngine(max_sequences=2)
    engine.go.clear()
    worker = await crew.start(engine=engine)
    for n in range(20):
        await crew.submit(f"j{n}")
    await crew.until(lambda: worker.service.running and not worker.service.running.jobs.room, "a full worker")
    for n in range(5):
        await crew.submit(f"late{n}", "high")

    await crew.until(
        lambda: b'gllm_queue_depth{priority="high"} 5.0' in worker.service.metrics.render(), "the depth of the queue"
    )
    assert await crew.bench.pending("high") == 0


async def test_metrics_of_a_few_jobs_add_up(crew: ServiceBench) -> None:
    worker = await crew.start()
    for n in range(5):
        await crew.submit(f"j{n}", max_tokens=4)
    await crew.bench.submit("bad", body="{")
    for job_id in [*(f"j{n}" for n in range(5)), "bad"]:
        await crew.reply(job_id)

    async def page() -> str | None:
        text = worker.service.metrics.render().decode()
        return text if 'gllm_jobs_total{outcome="length"} 5.0' in text else None

    text = await until(page, "the counts")
    assert "gllm_time_to_first_token_seconds_count 5.0" in text
    assert "gllm_inter_token_seconds_count 15.0" in text
    assert 'gllm_jobs_total{outcome="invalid"} 1.0' in text
    assert 'gllm_queue_depth{priority="normal"} 0.0' in text
