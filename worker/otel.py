"""Spans made with the OpenTelemetry SDK. Import it only where traces are asked for: it needs the extra `otel`."""

import logging
import threading
import time
from importlib.metadata import version

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gllm.protocol import Error
from worker import logs
from worker.active import ActiveJob
from worker.traces import Traces, Wall, attributes, phases

LIBRARIES = "opentelemetry"  # the logger that all of its packages log below
HEADERS = "opentelemetry.util.re"  # this one quotes headers, and a collector's token is one
QUIET_SECONDS = 60.0  # a collector that is away would fill the log
FLUSH_SECONDS = 1.0  # for the last spans: a worker that has ended must not wait for a collector
ABORT_SECONDS = 0.5  # and for its thread to see that nobody waits
MAX_TRACEPARENT = 256  # characters; more is no trace context of any version


class OtelTraces(Traces):
    """Spans for the collector that the standard variables name."""

    def __init__(self, queue: str, worker: str, model: str) -> None:
        self._complaints = Complaints()
        self._complaints.listen()
        try:
            self._exporter = OTLPSpanExporter()
            self._provider = provider(worker)
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except Exception:
            self._complaints.close()
            raise
        self._tracer = self._provider.get_tracer("gllm", version("gllm"))
        self._common = {
            "gen_ai.provider.name": "gllm",
            "gen_ai.request.model": model,
            "gllm.queue": queue,
            "gllm.worker": worker,
        }

    def left(self, job: ActiveJob, how: str) -> None:
        try:
            self._record(job, how)
        except Exception as error:  # a fault of ours, or of the SDK: no job may notice
            self._complaints.say(f"{type(error).__name__}: {error}")

    def _record(self, job: ActiveJob, how: str) -> None:
        wall = Wall()
        parts = phases(job, wall.now)
        start = min([job.clock.claimed, *(part.start for part in parts)])
        span = self._tracer.start_span(
            "gllm.job", parent_of(job.claimed.traceparent), SpanKind.CONSUMER, start_time=wall(start)
        )
        if span.is_recording():  # not where the producer's trace is not sampled
            span.set_attributes({**self._common, **attributes(job, how)})
            if isinstance(job.terminal, Error) and how == job.outcome:
                span.set_attribute("error.type", job.terminal.code)
                span.set_status(Status(StatusCode.ERROR, job.terminal.code))  # its message may quote the prompt
            inside = set_span_in_context(span, Context())
            for part in parts:
                child = self._tracer.start_span(part.name, inside, start_time=wall(part.start))
                child.end(wall(part.end))
        span.end(wall(wall.now))

    def close(self) -> None:
        flushing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            self._exporter.shutdown()  # ends its pauses between tries; a thread that waits for a socket ends with us
            flushing.join(ABORT_SECONDS)
        self._complaints.close()


def provider(worker: str) -> TracerProvider:
    """A source of tracers, nobody else's; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over our names."""
    names = {"service.name": "gllm", "service.version": version("gllm"), "service.instance.id": worker}
    resource = Resource.create(names).merge(OTELResourceDetector().detect())
    return TracerProvider(resource=resource, shutdown_on_exit=False)


def parent_of(traceparent: str | None) -> Context:
    """The context that a W3C trace parent names; an empty one when it is malformed, so that a new trace begins."""
    if not traceparent or len(traceparent) > MAX_TRACEPARENT:
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


class Complaints(logging.Handler):
    """What OpenTelemetry's libraries have to say, at most one line in `QUIET_SECONDS`, as an event of ours."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._log = structlog.get_logger()
        self._next = time.monotonic()
        self._hidden = 0

    def listen(self) -> None:
        """Take the place of all other handlers, until closed."""
        logger = logging.getLogger(LIBRARIES)
        logger.addHandler(self)
        logger.propagate = False

    def close(self) -> None:
        logger = logging.getLogger(LIBRARIES)
        logger.removeHandler(self)
        logger.propagate = not logger.handlers
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(str(record.msg) if record.name == HEADERS else record.getMessage())

    def say(self, message: str) -> None:
        """Log it, or count it when another one was logged lately."""
        now = time.monotonic()
        if now < self._next:
            self._hidden += 1
            return
        hidden, self._hidden, self._next = self._hidden, 0, now + QUIET_SECONDS
        self._log.warning(logs.TRACES_FAILED, message=message, hidden=hidden)
