"""Traces: which spans a job leaves, when and below whom, whatever becomes of it."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from tests.docs.pages import Page
from tests.servers import Server, first_kind
from tests.worker.fake_engine import FakeEngine
from tests.worker.service_bench import ServiceBench
from tests.worker.span_bench import PARENT, PARTS, SPAN, TRACE, Spans, ask_for_nothing, check, facts
from worker import otel, running, traces

PAGE = Page("docs/operations.md")
UNSAMPLED = PARENT[:-1] + "0"
SECRET = "qxzcanary"


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough here."""
    return first_kind()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for_nothing(monkeypatch)


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    """What is logged meanwhile."""
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Traces are asked for, and stay in memory."""
    spans = Spans()
    monkeypatch.setenv(traces.ENDPOINTS[1], "http://127.0.0.1:9/")
    monkeypatch.setattr(otel, "OTLPSpanExporter", spans.exporter)
    return spans


def length(span: ReadableSpan) -> float:
    return ((span.end_time or 0) - (span.start_time or 0)) / 1e9


async def test_finished_job_leaves_a_span_below_its_producers_with_a_part_for_each_state(
    crew: ServiceBench, spans: Spans
) -> None:
    began = time.time_ns()
    await crew.submit(max_tokens=5, prompt=SECRET, entry={"traceparent": PARENT})
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01))
    reply = await crew.reply()
    await worker.stop()

    job, parts = spans.one()
    assert [part.name for part in parts] == PARTS
    assert job.parent is not None
    assert (job.context.trace_id, job.parent.span_id, job.parent.is_remote) == (TRACE, SPAN, True)
    assert job.start_time == parts[0].start_time
    assert began - 10**8 < (job.start_time or 0)
    assert length(parts[0]) > 0.001  # it was there before the worker
    assert length(parts[2]) > 0.03  # four steps after the first
    assert facts(job) == {
        "gen_ai.provider.name": "gllm",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "a",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gllm.job.id": "a",
        "gllm.epoch": 1,
        "gllm.attempt": 1,
        "gllm.priority": "normal",
        "gllm.queue": crew.bench.keys.queue,
        "gllm.worker": worker.service.name,
        "gllm.preemptions": 0,
        "gllm.outcome": "length",
    }
    assert {name for name in [*facts(job), *PARTS] if f"`{name}`" not in PAGE.sections["Traces"]} == set()
    assert job.status.status_code is StatusCode.UNSET
    written = "".join(span.to_json() for span in spans.all)
    assert SECRET not in written
    assert reply.text not in written


async def test_chat_is_called_chat_and_a_job_without_a_parent_begins_a_trace(crew: ServiceBench, spans: Spans) -> None:
    worker = await crew.start()
    await crew.submit(prompt=None, messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    await crew.reply()
    await worker.stop()

    job, parts = spans.one()
    assert job.parent is None
    assert facts(job)["gen_ai.operation.name"] == "chat"
    assert [part.name for part in parts] == [name for name in PARTS if name != "gllm.decode"]  # one token has no next


async def test_cancelled_job_is_no_error(crew: ServiceBench, spans: Spans) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01))
    await crew.submit(max_tokens=4000)
    await crew.published("a", 2)
    await crew.bench.redis.set(crew.bench.keys.cancel("a"), 1, ex=60)
    await crew.reply()
    await worker.stop()

    job, parts = spans.one()
    assert facts(job)["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert job.status.status_code is StatusCode.UNSET
    assert [part.name for part in parts] == PARTS


async def test_failed_job_is_an_error_by_its_code_alone(crew: ServiceBench, spans: Spans) -> None:
    worker = await crew.start()
    worker.engine.refuse["a"] = "too_large", f"tokens: {SECRET}"
    await crew.submit("a")
    await crew.submit("b", prompt=None, colour=SECRET)
    await crew.reply("a")
    await crew.reply("b")
    await worker.stop()

    found = {facts(job)["gllm.job.id"]: job for job in spans.jobs()}
    assert {name: (job.status.status_code, job.status.description) for name, job in found.items()} == {
        "a": (StatusCode.ERROR, "too_large"),
        "b": (StatusCode.ERROR, "invalid"),
    }
    assert {facts(job)["error.type"] for job in found.values()} == {"too_large", "invalid"}
    assert [part.name for part in spans.parts(found["a"])] == ["gllm.wait", "gllm.prefill", "gllm.publish"]
    assert [part.name for part in spans.parts(found["b"])] == ["gllm.wait", "gllm.publish"]
    assert SECRET not in "".join(span.to_json() for span in spans.all)


async def test_job_of_a_killed_worker_goes_on_as_a_new_span_below_the_same_parent(
    crew: ServiceBench, spans: Spans
) -> None:
    first = await crew.start(engine=FakeEngine(step_seconds=0.01))
    await crew.submit(max_tokens=60, entry={"traceparent": PARENT})
    await crew.published("a", 5)
    await first.kill()
    second = await crew.start()
    reply = await crew.reply()
    await second.stop()

    job, parts = spans.one()  # the dead one told nothing
    assert job.parent is not None
    assert (job.context.trace_id, job.parent.span_id) == (TRACE, SPAN)
    assert [part.name for part in parts] == ["gllm.prefill", "gllm.decode", "gllm.publish"]
    told = facts(job)
    assert (told["gllm.attempt"], told["gllm.taken_from"]) == (2, first.service.name)
    assert told["gllm.resumed_from"] == reply.resumes[0].first >= 5
    assert told["gen_ai.usage.output_tokens"] == 60


async def test_job_that_is_handed_back_or_lost_ends_its_span_as_such(crew: ServiceBench, spans: Spans) -> None:
    worker = await crew.start(grace=0.1, engine=FakeEngine(step_seconds=0.01))
    for name in ("lost", "back"):
        await crew.submit(name, max_tokens=4000, entry={"traceparent": PARENT})
        await crew.published(name, 2)
    await crew.bench.redis.hset(crew.bench.keys.job("lost"), "epoch", 7)
    await crew.until(lambda: [job.id for job in worker.jobs] == ["back"], "the other one to be fenced")
    await worker.stop()

    found = {facts(job)["gllm.job.id"]: job for job in spans.jobs()}
    assert {name: facts(job)["gllm.outcome"] for name, job in found.items()} == {"lost": "fenced", "back": "released"}
    for job in found.values():
        check(job, spans.parts(job))
        assert [part.name for part in spans.parts(job)] == ["gllm.wait", "gllm.prefill", "gllm.decode"]
        assert "gen_ai.response.finish_reasons" not in facts(job)


async def test_job_that_a_worker_leaves_because_redis_is_gone_ends_its_span(
    own_crew: ServiceBench, own_server: Server, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LAST_WORDS_SECONDS", 0.2)
    worker = await own_crew.start(grace=0.1, engine=FakeEngine(step_seconds=0.01))
    await own_crew.submit(max_tokens=4000)
    await own_crew.published("a", 2)
    own_server.stop(kill=True)
    await worker.stop()

    job, _ = spans.one()
    assert facts(job)["gllm.outcome"] == "abandoned"


async def test_producer_decides_what_is_sampled(crew: ServiceBench, spans: Spans) -> None:
    worker = await crew.start()
    await crew.submit("quiet", entry={"traceparent": UNSAMPLED})
    await crew.submit("loud", entry={"traceparent": PARENT})
    await crew.reply("quiet")
    await crew.reply("loud")
    await worker.stop()

    assert [facts(job)["gllm.job.id"] for job in spans.jobs()] == ["loud"]
    assert len(spans.all) == 1 + len(spans.parts(spans.jobs()[0]))


MALFORMED = {
    "empty": "",
    "words": "from the other service",
    "short": PARENT[:-4],
    "upper case": PARENT.upper(),
    "zero trace": f"00-{0:032x}-{SPAN:016x}-01",
    "zero span": f"00-{TRACE:032x}-{0:016x}-01",
    "forbidden version": "ff" + PARENT[2:],
    "more in version 0": PARENT + "-00",
    "surrogates": "00-\udcff" + PARENT[4:],
    "other digits": PARENT.replace("1", "\u0661"),
    "long": "cc" + PARENT[2:] + "-" + "0" * 4000,
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in MALFORMED.items()])
def test_malformed_parent_is_as_good_as_none(text: str) -> None:
    assert not otel.parent_of(text)


def test_parent_of_a_later_version_is_understood() -> None:
    assert otel.parent_of("01" + PARENT[2:] + "-more")


async def test_job_with_a_malformed_parent_runs_and_begins_a_trace(
    crew: ServiceBench, spans: Spans, lines: list[Any]
) -> None:
    worker = await crew.start()
    await crew.submit(entry={"traceparent": b"00-\xff" + PARENT.encode()})
    await crew.reply()
    await worker.stop()

    job, _ = spans.one()
    assert job.parent is None
    assert [line for line in lines if line["log_level"] == "warning"] == []


async def test_fault_in_the_making_of_spans_is_a_line_in_the_log_and_no_jobs_trouble(
    crew: ServiceBench, spans: Spans, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel, "attributes", lambda job, how: 1 / 0)
    worker = await crew.start()
    for name in ("a", "b"):
        await crew.submit(name)
        await crew.reply(name)

    assert await worker.stop() == 0
    (line,) = [line for line in lines if line["event"] == "traces_failed"]  # the second one is only counted
    assert line["message"] == "ZeroDivisionError: division by zero"
