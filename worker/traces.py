"""Optional OpenTelemetry traces: a span for each attempt at a job, with children for wait, prefill, decode and publish.

A job leaves marks in its clock when its state changes, and nothing else is done while it runs. When it leaves this
worker, spans are made of the marks in one go and put into the SDK's queue; a thread of the SDK sends them. The standard
variables of OpenTelemetry decide whether that happens. Unless they ask for it, none of its packages is imported here.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from worker import logs
from worker.active import ActiveJob

EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # the first one wins, as above
OUR_PROTOCOL = "http/protobuf"

_log = structlog.get_logger()


class Unusable(Exception):
    """Traces are asked for, but cannot be made; the message says why."""


class Phase(NamedTuple):
    """A part of a job's life here; `start` and `end` are `time.monotonic()`."""

    name: str
    start: float
    end: float


class Traces:
    """What jobs tell when they leave this worker. This one is deaf: traces are not asked for, or not possible."""

    def left(self, job: ActiveJob, how: str) -> None:
        """`how`: the job's outcome once its end is written, else fenced, released or abandoned. Raises nothing."""

    def close(self) -> None:
        """Send what is left. Takes a second or two at most, and blocks; raises nothing."""


def begin(queue: str, worker: str, model: str) -> Traces:
    """Traces if the environment asks for them and they can be made, else a line in the log and deaf ones. Blocks."""
    try:
        if not asked_for(os.environ):
            return Traces()
        return _connect(queue, worker, model)
    except Exception as error:  # whatever the SDK has against its settings is no reason not to serve
        message = str(error) if isinstance(error, Unusable) else f"{type(error).__name__}: {error}"
        _log.warning(logs.TRACES_OFF, message=message)
        return Traces()


def preload() -> None:
    """Import what `begin` will need, for a process that is about to freeze its modules; `begin` reports failures."""
    try:
        if asked_for(os.environ):
            import worker.otel  # noqa: F401
    except Exception:
        return


def asked_for(environ: Mapping[str, str]) -> bool:
    """Whether spans are to be exported. Raises Unusable for a way of exporting that there is none for here."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get(EXPORTER, "").strip()
    if exporter == "none" or not (exporter or any(environ.get(name) for name in ENDPOINTS)):
        return False
    if exporter not in ("", "otlp"):
        raise Unusable(f"{EXPORTER}: otlp or none expected, got {exporter!r}")
    given = [(name, environ[name].strip()) for name in PROTOCOLS if environ.get(name)]
    if given and given[0][1] != OUR_PROTOCOL:
        raise Unusable(f"{given[0][0]}: {OUR_PROTOCOL} expected, got {given[0][1]!r}")
    return True


def _connect(queue: str, worker: str, model: str) -> Traces:
    try:
        from worker.otel import OtelTraces
    except ModuleNotFoundError as error:
        raise Unusable(f"the environment asks for traces, but {error.name} is not installed: gllm[otel]") from None
    path = Path(model)
    traces = OtelTraces(queue, worker, path.name if path.exists() else model)  # where it lies is this host's affair
    _log.info(logs.TRACES_ON)
    return traces


def phases(job: ActiveJob, now: float) -> list[Phase]:
    """What of a job's life has happened here, in order, `now` being its last moment."""
    clock = job.clock
    over = now if clock.over is None else clock.over
    found: list[Phase] = []
    if job.claimed.claims == 1:  # later on, the time since submission is others' work as well
        found.append(Phase("gllm.wait", clock.claimed - clock.waited, clock.claimed))
    if clock.given is not None:
        found.append(Phase("gllm.prefill", clock.given, over if clock.first is None else clock.first))
    if clock.first is not None and clock.last is not None and clock.last > clock.first:
        found.append(Phase("gllm.decode", clock.first, clock.last))
    if clock.over is not None:
        found.append(Phase("gllm.publish", clock.over, now))
    return found


def attributes(job: ActiveJob, how: str) -> dict[str, str | int | list[str]]:
    """What a job's span says of it; nothing of what the job or its reply contains."""
    claimed = job.claimed
    found: dict[str, str | int | list[str]] = {
        "gen_ai.response.id": job.id,
        "gen_ai.usage.input_tokens": job.prompt_tokens,
        "gen_ai.usage.output_tokens": max(job.n, job.published),
        "gen_ai.usage.cache_read.input_tokens": job.cached_tokens or 0,
        "gllm.job.id": job.id,
        "gllm.epoch": claimed.epoch,
        "gllm.attempt": claimed.claims,
        "gllm.priority": claimed.stream.split(":")[1],
        "gllm.preemptions": job.preemptions,
        "gllm.outcome": how,
    }
    if job.chat is not None:
        found["gen_ai.operation.name"] = "chat" if job.chat else "text_completion"
    if job.finish_reason is not None and how == job.outcome:
        found["gen_ai.response.finish_reasons"] = [job.finish_reason]
    if claimed.claims > 1:
        found["gllm.resumed_from"] = claimed.published
        found["gllm.taken_from"] = claimed.taken_from
    return found


class Wall:
    """Moments of `time.monotonic()` on this host's wall clock, in nanoseconds since 1970.

    One reading of both clocks serves all of a job's moments, so that a wall clock that was set meanwhile bends none.
    """

    def __init__(self) -> None:
        self.now = time.monotonic()
        self._offset = time.time_ns() - round(self.now * 1e9)

    def __call__(self, moment: float) -> int:
        return self._offset + round(moment * 1e9)
