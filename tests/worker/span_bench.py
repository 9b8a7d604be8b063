"""Spans that workers export, kept in memory, and what must be true of any of them."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from worker import traces

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = f"00-{TRACE:032x}-{SPAN:016x}-01"
PARTS = ["gllm.wait", "gllm.prefill", "gllm.decode", "gllm.publish"]
VARIABLES = (traces.EXPORTER, *traces.ENDPOINTS, *traces.PROTOCOLS, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME")


def ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment of the tests has to say."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


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
