"""Traces: which spans a job leaves, when, below whom; and that neither they nor their collector disturb a worker."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.servers import Server, first_kind
from tests.test_layering import run_with_blocked
from tests.worker.fake_engine import FakeEngine
from tests.worker.service_bench import ServiceBench
from worker import otel, running, traces

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = f"00-{TRACE:032x}-{SPAN:016x}-01"
UNSAMPLED = PARENT[:-1] + "0"
SECRET = "qxzcanary"
PARTS = ["gllm.wait", "gllm.prefill", "gllm.decode", "gllm.publish"]


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough here."""
    return first_kind()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (traces.EXPORTER, *traces.ENDPOINTS, *traces.PROTOCOLS, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    """What is logged meanwhile."""
    with structlog.testing.capture_logs() as captured:
        yield captured


class Spans:
    """What workers have exported into memory: one exporter a worker, because its end is its exporter's."""

    def __init__(self) -> None:
        self._exporters: list[InMemorySpanExporter] = []

    def exporter(self) -> InMemorySpanExporter:
        self._exporters.append(InMemorySpanExporter())
        return self._exporters[-1]

    @property
    def all(self) -> list[ReadableSpan]:
        return [span for exporter in self._exporters for span in exporter.get_finished_spans()]

    def jobs(self) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == "gllm.job"]

    def parts(self, job: ReadableSpan) -> list[ReadableSpan]:
        """Its children in order of their start."""
        inside = [span for span in self.all if span.parent is not None and span.parent.span_id == job.context.span_id]
        return sorted(inside, key=lambda span: (span.start_time or 0, PARTS.index(span.name)))

    def one(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        (job,) = self.jobs()
        check(job, self.parts(job))
        return job, self.parts(job)


def check(job: ReadableSpan, parts: Sequence[ReadableSpan]) -> None:
    """Parts lie within their job, one after the other, and nothing is in the future."""
    assert {span.context.trace_id for span in (job, *parts)} == {job.context.trace_id}
    assert [part.name for part in parts] == [name for name in PARTS if name in {part.name for part in parts}]
    times = [job.start_time, *(moment for part in parts for moment in (part.start_time, part.end_time)), job.end_time]
    assert times == sorted(times, key=lambda moment: moment or 0)
    assert (job.end_time or 0) <= time.time_ns()


def facts(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Traces are asked for, and stay in memory."""
    spans = Spans()
    monkeypatch.setenv(traces.ENDPOINTS[1], "http://127.0.0.1:9/")
    monkeypatch.setattr(otel, "OTLPSpanExporter", spans.exporter)
    return spans


async def test_finished_job_leaves_a_span_below_its_producers_with_a_part_for_each_state(
    crew: ServiceBench, spans: Spans
) -> None:
    began = time.time_ns()
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01))
    worker.engine.go.clear()
    await crew.submit(max_tokens=5, prompt=SECRET, entry={"traceparent": PARENT})
    await crew.until(lambda: worker.engine.added, "the job in the engine")
    worker.engine.go.set()
    reply = await crew.reply()
    await worker.stop()

    job, parts = spans.one()
    assert [part.name for part in parts] == PARTS
    assert job.parent is not None
    assert (job.context.trace_id, job.parent.span_id, job.parent.is_remote) == (TRACE, SPAN, True)
    assert began - 10**9 < (job.start_time or 0) < (parts[0].end_time or 0)
    decode = parts[2]
    assert 0.03 < ((decode.end_time or 0) - (decode.start_time or 0)) / 1e9 < 5  # four steps after the first
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


# -- when, and with what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "otlp"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),  # nobody asked
    ],
)
def test_standard_variables_say_whether_there_are_traces(environ: dict[str, str], asked: bool) -> None:
    assert traces.asked_for(environ) is asked


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: otlp or none expected, got 'zipkin'"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: http/protobuf expected, got 'grpc'",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "max_queue_size must be"),
    ],
)
def test_settings_that_cannot_be_are_a_line_in_the_log(
    environ: dict[str, str], message: str, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert type(traces.begin("q", "w", "m")) is traces.Traces
    (line,) = lines
    assert line["event"] == "traces_off"
    assert message in line["message"]
    assert logging.getLogger(otel.LIBRARIES).propagate


NOTHING = """
import os, sys
from worker import service, traces
traces.preload()
assert type(traces.begin("q", "w", "m")) is traces.Traces
assert not [name for name in sys.modules if name.startswith("opentelemetry")], "nobody asked for it"
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
import structlog
with structlog.testing.capture_logs() as lines:
    traces.preload()
    assert type(traces.begin("q", "w", "m")) is traces.Traces
assert [line["event"] for line in lines] == ["traces_off"], lines
assert "opentelemetry is not installed: gllm[otel]" in lines[0]["message"], lines
"""


def test_without_the_extra_there_is_one_line_and_only_where_traces_are_asked_for() -> None:
    run_with_blocked({"opentelemetry"}, NOTHING)


async def test_worker_serves_without_the_extra(
    crew: ServiceBench, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(traces.EXPORTER, "otlp")
    monkeypatch.setitem(sys.modules, "worker.otel", None)
    worker = await crew.start()
    await crew.submit(entry={"traceparent": PARENT})
    await crew.reply()

    assert await worker.stop() == 0
    assert [line["event"] for line in lines if line["event"].startswith("traces")] == ["traces_off"]


# -- the collector ------------------------------------------------------------------------------------------------


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP; `server.answers` is cleared for one that takes a request and says nothing."""

    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        self.server.answers.wait(10)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.requests, server.answers = [], threading.Event()
    server.answers.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.answers.set()
    server.shutdown()
    thread.join()
    server.server_close()


def address(collector: Any) -> str:
    return f"http://127.0.0.1:{collector.server_address[1]}"


async def test_spans_reach_a_collector(
    crew: ServiceBench, collector: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address(collector))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20me")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=llm")
    worker = await crew.start()
    await crew.submit(max_tokens=3, entry={"traceparent": PARENT})
    await crew.reply()
    await worker.stop()

    ((path, token, body),) = collector.requests
    assert (path, token) == ("/v1/traces", "Bearer me")
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    resource = {item.key: item.value.string_value for item in sent.resource.attributes}
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("llm", "test")
    assert resource["service.instance.id"] == worker.service.name
    found = [span for scope in sent.scope_spans for span in scope.spans]
    assert sorted(span.name for span in found) == sorted(["gllm.job", *PARTS])
    assert {span.trace_id for span in found} == {TRACE.to_bytes(16, "big")}
    (job,) = [span for span in found if span.name == "gllm.job"]
    assert job.parent_span_id == SPAN.to_bytes(8, "big")
    assert {span.parent_span_id for span in found if span is not job} == {job.span_id}
    assert [line["event"] for line in lines if line["event"].startswith("traces")] == ["traces_on"]


@contextmanager
def nobody(collector: Any) -> Iterator[str]:
    """The address of a port that is closed."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        url = address(server)
    yield url


@contextmanager
def silence(collector: Any) -> Iterator[str]:
    collector.answers.clear()
    yield address(collector)


@pytest.mark.parametrize("broken", [nobody, silence])
async def test_collector_that_is_away_costs_one_line_and_a_moment_at_the_end(
    crew: ServiceBench,
    collector: Any,
    broken: Callable[[Any], Any],
    lines: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otel, "FLUSH_SECONDS", 0.2)
    monkeypatch.setattr(otel, "ABORT_SECONDS", 0.1)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with broken(collector) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        worker = await crew.start()
        for name in ("a", "b", "c"):
            await crew.submit(name)
            await crew.reply(name)
        began = time.monotonic()
        assert await worker.stop() == 0
        assert time.monotonic() - began < 1.5
    failures = [line for line in lines if line["event"] == "traces_failed"]
    assert len(failures) == (1 if broken is nobody else 0)
    assert [line for line in lines if line["event"] == "library"] == []


def test_flush_at_the_end_is_short() -> None:
    assert otel.FLUSH_SECONDS + otel.ABORT_SECONDS <= 2


# -- what the libraries say ---------------------------------------------------------------------------------------


def test_complaints_of_the_libraries_are_one_line_a_minute_and_never_a_header(
    lines: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    complaints = otel.Complaints()
    complaints.listen()
    logger = logging.getLogger("opentelemetry.sdk.trace.export")
    for number in range(5):
        logger.warning("no. %d", number)
    monkeypatch.setattr(otel, "QUIET_SECONDS", 0.0)
    complaints._next = 0.0
    logging.getLogger(otel.HEADERS).warning("Header format invalid! %s", f"Bearer {SECRET}")
    logger.info("nobody needs this")
    complaints.close()

    assert [(line["event"], line["message"], line["hidden"]) for line in lines] == [
        ("traces_failed", "no. 0", 0),
        ("traces_failed", "Header format invalid! %s", 4),
    ]
    assert caplog.text == ""
    assert logging.getLogger(otel.LIBRARIES).propagate
