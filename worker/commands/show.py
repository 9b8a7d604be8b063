"""`gllm show`: everything about one job."""

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click
from msgspec import Struct

from worker.commands.access import inspected
from worker.commands.job_table import STATE_COLOURS
from worker.commands.options import setting_options
from worker.commands.screen import page, present, reading_options
from worker.commands.tables import Cell, Column, Page
from worker.humane import counted, duration, number, size
from worker.terminal import json_line, visible

if TYPE_CHECKING:
    from gllm.protocol import ReplyEvent, Resume, Start
    from worker.inspection.inspector import Inspector
    from worker.inspection.records import EventRow, Holder, JobView, Letter, Place, Record, ReplyView

Pair = tuple[str, str | Cell | None]
OUR_VERSION = ("v", "1")  # goes without saying
EVENT_COLUMNS = (Column("ENTRY"), Column("EVENT"), Column("WHAT", shrinks=True))


@click.command("show", short_help="Everything about one job.")
@click.argument("job_id", metavar="ID")
@setting_options("redis", "queue")
@click.option("--text", "text", is_flag=True, help="Only the reply's text, as far as it is written.")
@click.option("--events", "events", is_flag=True, help="Each event of the reply, too.")
@reading_options
def show_command(
    job_id: str, redis: str | None, queue: str | None, text: bool, events: bool, as_json: bool, watch: float | None
) -> NoReturn:
    """Everything about one job: its record, its place, its reply, its end. Exit status 1 for an id nobody knows."""
    shape = Shape(as_json=as_json, text=text, events=events)
    with inspected(redis, queue) as inspector:
        present(lambda: _show(inspector, job_id, shape), watch)
    sys.exit(0)


class Shape(Struct, frozen=True, kw_only=True):
    """How a job is shown. `as_json` for programs, `text` the reply's text alone, `events` each event of the reply."""

    as_json: bool
    text: bool
    events: bool


def _show(inspector: "Inspector", job_id: str, shape: Shape) -> str:
    view = inspector.job(job_id)
    if view is None:
        raise click.ClickException(_unknown(inspector, job_id))
    if shape.as_json:
        return json_line(_for_programs(view, text=shape.text, events=shape.events))
    if shape.text:
        return visible(view.reply.text if view.reply else "")
    return "\n".join(_lines(page(), view, shape.events))


def _unknown(inspector: "Inspector", job_id: str) -> str:
    from gllm.keys import JOB_ID
    from worker.inspection.one_job import MAX_LOOKED
    from worker.terminal import one_line

    if not JOB_ID.fullmatch(job_id):
        return f"id: 1 to 128 characters of [A-Za-z0-9._:-] expected, got {one_line(job_id)!r}"
    deep = any(stream.waiting > MAX_LOOKED for stream in inspector.survey().streams)
    looked = f" (of those that wait, the first {MAX_LOOKED:,} of each priority were looked at)" if deep else ""
    return f"queue {inspector.keys.queue} knows no job {job_id}{looked}"


def _for_programs(view: "JobView", *, text: bool, events: bool) -> dict[str, Any]:
    import msgspec

    shown = msgspec.to_builtins(view)
    if view.reply:
        shown["reply"]["end"] = msgspec.to_builtins(view.reply.end)
        for name in (name for name, wanted in (("text", text), ("events", events)) if not wanted):
            del shown["reply"][name]
    return shown


def _lines(to: Page, view: "JobView", events: bool) -> list[str]:
    lines = to.pairs([*_job(view), *_reply(view.reply), *_letters(view.letters), *_problems(view)])
    if events and view.reply:
        rows = [[row.entry, *_event(row)] for row in view.reply.events]
        lines += ["", *to.table(EVENT_COLUMNS, rows)]
    return lines


def _job(view: "JobView") -> list[Pair]:
    due = None if view.due_in_ms is None else f"in {duration(view.due_in_ms)}"
    return [
        ("job", view.id),
        ("state", Cell(view.state + _where(view.holder), STATE_COLOURS.get(view.state))),
        ("place", view.place and _place(view.place)),
        ("due", due),
        ("submitted", None if view.age_ms is None else f"{duration(view.age_ms)} ago"),
        ("entry", None if view.entry is None else f"{view.entry} in {view.stream}"),
        ("body", None if view.body_bytes is None else size(view.body_bytes)),
        *(
            (name, _label(name, value, view.now_ms))
            for name, value in view.labels.items()
            if (name, value) != OUR_VERSION
        ),
        ("record", view.record and _record(view.record)),
        ("cancel", "asked for" if view.cancelling else None),
    ]


def _label(name: str, value: str, now_ms: int) -> str:
    if name not in ("deadline", "not_before") or not (value.isdecimal() and len(value) < 16):
        return value
    left = int(value) - now_ms
    return f"{value}, {f'in {duration(left)}' if left > 0 else f'{duration(-left)} ago'}"


def _where(holder: "Holder | None") -> str:
    if holder is None or holder.consumer.startswith("-"):
        return ""
    return f" by {holder.consumer}, renewed {duration(holder.idle_ms)} ago"


def _place(place: "Place") -> str:
    if place.ahead is None:
        return f"far behind: one of {counted(place.waiting, 'job')} that wait in {place.stream}"
    return f"{place.ahead + 1:,} of {place.waiting:,} that wait in {place.stream}"


def _record(record: "Record") -> str:
    told = [
        f"epoch {record.epoch}",
        counted(record.claims, "claim"),
        f"{counted(record.attempts, 'worker')} died with it",
        counted(record.tokens, "token"),
    ]
    return ", ".join(told) + _kept(record.life_ms)


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count:,} entries"


def _kept(life_ms: int | None) -> str:
    return "" if life_ms is None else f"; kept for {duration(life_ms)}"


def _reply(reply: "ReplyView | None") -> list[Pair]:
    if reply is None:
        return [("reply", "none")]
    count = f"{counted(reply.tokens, 'token')}, {counted(reply.characters, 'character')}"
    return [
        ("reply", f"{count} in {_entries(reply.entries)}{_kept(reply.life_ms)}"),
        *((mark.__struct_config__.tag, _mark(mark)) for mark in reply.marks),  # type: ignore[misc]
        ("end", Cell(_told(reply.end)[1], "green" if _told(reply.end)[0] == "done" else "red") if reply.end else None),
        ("problem", Cell(reply.problem, "red") if reply.problem else None),
    ]


def _mark(mark: "Start | Resume") -> str:
    return f"by {mark.worker}, " + _told(mark)[1]


def _event(row: "EventRow") -> tuple[str, str]:
    return ("?", row.raw or "") if row.event is None else _told(row.event)


def _told(event: "ReplyEvent") -> tuple[str, str]:
    """Type and content of an event, in short."""
    from gllm.protocol import Done, Error, Resume, Start

    if isinstance(event, Start):
        return (
            "start",
            f"attempt {event.attempt}, {event.prompt_tokens:,} prompt tokens, {event.cached_tokens:,} cached",
        )
    if isinstance(event, Resume):
        return "resume", f"attempt {event.attempt}, from token {event.first:,}, {'' if event.exact else 'not '}exact"
    if isinstance(event, Done):
        return "done", _done(event)
    if isinstance(event, Error):
        return "error", f"{event.code}: {event.message}" + (" (may work if submitted anew)" if event.retryable else "")
    return "tokens", f"{counted(len(event.ids), 'token')} from {event.first:,}: {event.text!r}"


def _done(event: Any) -> str:
    stop = "" if event.stop is None else f" at {event.stop!r}"
    first = event.timings.first_token
    times = [("waited", event.timings.queue), ("first token", first), ("total", event.timings.total)]
    told = ", ".join(f"{name} {duration(1000 * seconds)}" for name, seconds in times if seconds is not None)
    return f"{event.finish_reason}{stop}, {number(event.usage.completion_tokens)} tokens; {told}"


def _letters(letters: "list[Letter]") -> list[Pair]:
    return [
        ("dead", Cell(f"{letter.reason}: {letter.error} (gllm dead show {letter.entry})", "red")) for letter in letters
    ]


def _problems(view: "JobView") -> list[Pair]:
    return [("problem", Cell(problem, "red")) for problem in view.problems]
