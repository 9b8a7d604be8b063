"""When there are traces, with what settings, and that a collector that is away disturbs no worker."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.servers import first_kind
from tests.test_layering import run_with_blocked
from tests.worker.service_bench import ServiceBench
from tests.worker.span_bench import PARENT, PARTS, SPAN, TRACE, ask_for_nothing
from worker import otel, traces

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
    caplog: pytest.LogCaptureFixture,
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
    assert [record.name for record in caplog.records if record.name.startswith(otel.LIBRARIES)] == []


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
