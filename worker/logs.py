"""Structured logs on stderr: one JSON object a line, from the first line on, whatever it contains.

Lines of libraries (through `logging`), `warnings` and uncaught exceptions take the same way: their event is `library`
or `crashed`, and what they say is in `message`. Our own lines carry an event of the vocabulary below; who reads logs by
program can rely on these names.
"""

import logging
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import msgspec
import structlog

from worker.terminal import one_line

# The vocabulary. A new event gets a constant here first; ids, counts and seconds go into fields, never into names.
STARTING = "starting"  # the process has read its settings
REDIS_WAITING = "redis_waiting"  # Redis is not there or not able; tried again with growing pauses
REDIS_CONNECTED = "redis_connected"
REDIS_LOST = "redis_lost"
REDIS_RECOVERED = "redis_recovered"
REDIS_REFUSED = "redis_refused"  # an answer that no waiting will cure
QUEUE_MISMATCH = "queue_mismatch"  # the queue's meta names another model, tokenizer or protocol
MODEL_LOADING = "model_loading"
ENGINE_LOADING = "engine_loading"  # one phase of the engine's start has ended
ENGINE_READY = "engine_ready"
ENGINE_OUTPUT = "engine_output"  # a line that the engine's process or one of its libraries printed
ENGINE_REFUSED = "engine_refused"  # settings or model at fault
ENGINE_DIED = "engine_died"
ENGINE_COMPILING = "engine_compiling"  # something is compiled or captured: the step may take minutes
ENGINE_HUNG = "engine_hung"
ENGINE_UNKILLABLE = "engine_unkillable"  # its process did not end when killed: it waits in a device driver
METRICS_LISTENING = "metrics_listening"
METRICS_FAILED = "metrics_failed"
READY = "ready"  # claims jobs from now on; carries url, the address of /metrics, /livez and /readyz
JOB_CLAIMED = "job_claimed"
JOB_STARTED = "job_started"
JOB_RESUMED = "job_resumed"
JOB_ENDED = "job_ended"
JOB_REJECTED = "job_rejected"
JOB_CANCELLED = "job_cancelled"
JOB_FENCED = "job_fenced"
JOB_REPAIRED = "job_repaired"
JOB_RELEASED = "job_released"
JOB_REDELIVERED = "job_redelivered"
JOB_DELAYED = "job_delayed"  # it is not to be run yet
JOB_PROMOTED = "job_promoted"  # and now it is
JOB_FAILED = "job_failed"  # a fault of ours, or of a library, in one job; `where` says in which lines of code
DEAD_LETTER = "dead_letter"
GROUP_LOST = "group_lost"
ENTRY_LOST = "entry_lost"  # a job's entry was trimmed or deleted while somebody had it
ENTRY_UNOWNED = "entry_unowned"  # entries that nobody had any more, though they were delivered: handed out again
KEY_BROKEN = "key_broken"  # a key of the queue is not what it should be
SELF_FENCED = "self_fenced"
LEASE_RENEWED = "lease_renewed"
CONSUMER_REAPED = "consumer_reaped"
PERFSTATS = "perfstats"
TRACES_ON = "traces_on"  # the environment asks for OpenTelemetry
TRACES_OFF = "traces_off"  # and it cannot be had
TRACES_FAILED = "traces_failed"  # spans may be lost; one line a minute, `hidden` counts those between
DRAINING = "draining"  # SIGTERM: no more claims
RELEASING = "releasing"  # second SIGTERM, or the grace time is over
STOPPED = "stopped"
FAILED = "failed"  # the worker cannot go on; the exit status is not 0
LIBRARY = "library"
CRASHED = "crashed"
LOG_FAILED = "log_failed"

# JSON leaves these as they are, but many readers take some for the end of a line, and terminals others for commands.
_RAW = (*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPED = {code: f"\\u{code:04x}" for code in _RAW}
# How a refusal goes on to what it was given: a value, a prompt, what a template said, a token, the words of a command.
_VALUE = re.compile(r"(, got | \(got | in \"|(?<=template failed): |: '|, with args ).*", re.DOTALL)
_UNKNOWN = re.compile(r".*: (?=unknown field)", re.DOTALL)  # the name is the producer's, and may be anything
_UNENCODABLE = (TypeError, ValueError, RecursionError)  # keys of odd types, lone surrogates, cycles

Shared = list[structlog.typing.Processor]


def configure(log_format: Literal["json", "console"] = "json", level: str = "info") -> None:
    """Send every line of this process to stderr in one form. May be called again; the last call counts."""
    handler = SafeHandler(sys.stderr)
    handler.setFormatter(_formatter(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    sys.excepthook = _log_crash
    threading.excepthook = _log_thread_crash
    sys.unraisablehook = _log_unraisable


class SafeHandler(logging.StreamHandler[Any]):
    """A record that cannot be written becomes a line that says so, where `logging` would print a bare traceback."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        problem = {"event": LOG_FAILED, "level": "error", "logger": record.name, "message": repr(sys.exc_info()[1])}
        try:
            self.stream.write(to_json(problem) + self.terminator)
        except (OSError, ValueError):
            return  # stderr is gone: there is nowhere left to say it


def of_job(job_id: str, epoch: int, attempt: int) -> Any:
    """The logger for all lines about one job at one worker; `attempt`: how often it was handed out."""
    return structlog.get_logger().bind(job=job_id, epoch=epoch, attempt=attempt)


def where(error: BaseException) -> list[str]:
    """The way to an error, innermost last, without its message: a library may have put a prompt there."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]


def without_value(message: str) -> str:
    """A refusal's field and reason. The value is for the client only: it may be the beginning of a prompt."""
    return _VALUE.sub("", _UNKNOWN.sub("", message))


def to_json(line: Mapping[str, Any]) -> str:
    """One JSON line for any dict: what JSON has no word for is written as its repr, NaN as null."""
    try:
        return _encode(line)
    except _UNENCODABLE:
        return _encode({ascii(key)[1:-1]: _plain(value) for key, value in line.items()})


def _plain(value: object) -> object:
    try:
        _encode(value)
    except _UNENCODABLE:
        return ascii(value)
    return value


def _encode(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=repr).decode().translate(_ESCAPED)


def _render(_: object, __: str, line: structlog.typing.EventDict) -> str:
    return to_json(line)


def _shared() -> Shared:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _formatter(log_format: Literal["json", "console"]) -> structlog.stdlib.ProcessorFormatter:
    as_json: Shared = [structlog.processors.format_exc_info, _render]
    plain = structlog.dev.plain_traceback  # the rich one prints local variables, prompts among them
    as_text: Shared = [_visible, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_shared(), structlog.stdlib.add_logger_name, _library],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *(as_json if log_format == "json" else as_text),
        ],
    )


def _library(_: object, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A library's text is no event name: it moves to `message`, so that events stay a fixed vocabulary."""
    return {**line, "event": LIBRARY, "message": str(line["event"]).rstrip()}


def _visible(_: object, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """For a terminal: every value on one line, and without what could steer it."""
    return {key: one_line(value) if isinstance(value, str) else value for key, value in line.items()}


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    structlog.get_logger().critical(CRASHED, message=f"{kind.__name__}: {error}", exc_info=(kind, error, trace))


def _log_thread_crash(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _log_crash(args.exc_type, args.exc_value, args.exc_traceback)


def _log_unraisable(args: "sys.UnraisableHookArgs") -> None:
    if args.exc_value is not None:
        _log_crash(args.exc_type, args.exc_value, args.exc_traceback)
