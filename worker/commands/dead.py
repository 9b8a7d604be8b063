"""`gllm dead`: jobs that no worker could do. Look at them, give them another life, or delete them."""

import itertools
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import click

from worker.commands.access import inspected
from worker.commands.options import setting_options
from worker.commands.screen import json_option, page
from worker.commands.tables import Cell, Column
from worker.humane import NOTHING, counted, duration, number, size
from worker.terminal import json_line, one_line

if TYPE_CHECKING:
    from worker.inspection.inspector import Inspector
    from worker.inspection.records import Letter

COLUMNS = (
    Column("ENTRY"),
    Column("AGE", right=True),
    Column("JOB", shrinks=True),
    Column("REASON"),
    Column("ATTEMPTS", right=True),
    Column("BODY", right=True),
    Column("ERROR", shrinks=True),
)
UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Age(click.ParamType[int]):
    """Milliseconds from 30s, 15m, 12h or 7d."""

    name = "age"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]{1,9})([smhd])", str(value))
        if match is None:
            self.fail(f"a time like 30s, 15m, 12h or 7d expected, got {value!r}", param, ctx)
        return int(match[1]) * UNITS_MS[match[2]]


@click.group("dead")
def dead_group() -> None:
    """Dead letters: jobs that could not be handled, and why. NAME is a job's id or the ENTRY of a letter."""


@dead_group.command("ls")
@setting_options("redis", "queue")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Most letters to show.")
@json_option
def ls_command(redis: str | None, queue: str | None, limit: int, as_json: bool) -> None:
    """Dead letters, the newest first."""
    with inspected(redis, queue) as inspector:
        total = inspector.survey().dead
        letters = list(itertools.islice(inspector.letters(), limit))
    if as_json:
        click.echo(json_line({"dead": total, "letters": letters}))
    elif not letters:
        click.echo("no dead letters")
    else:
        click.echo("\n".join(page().table(COLUMNS, map(_row, letters))))
        if total > len(letters):
            click.echo(f"… and {total - len(letters):,} more")


def _row(letter: "Letter") -> list[str | Cell]:
    return [
        letter.entry,
        duration(letter.age_ms),
        letter.id or NOTHING,
        letter.reason,
        number(letter.attempts),
        size(letter.body_bytes) + ("" if letter.kept or letter.body_bytes is None else ", not kept"),
        letter.error,
    ]


@dead_group.command("show")
@click.argument("name")
@setting_options("redis", "queue")
@json_option
def show_letter_command(name: str, redis: str | None, queue: str | None, as_json: bool) -> None:
    """A dead letter with the job's body. Of a job with several letters, the newest."""
    with inspected(redis, queue) as inspector:
        letter = _named(inspector, [name])[0]
        body = inspector.body_of(letter)
    if as_json:
        import msgspec

        click.echo(json_line({**msgspec.structs.asdict(letter), "body": None if body is None else _readable(body)}))
        return
    values = {
        "entry": f"{letter.entry}, {duration(letter.age_ms)} ago",
        "job": letter.id or NOTHING,
        "reason": letter.reason,
        "error": letter.error,
        "attempts": number(letter.attempts),
        "worker": letter.worker or None,
        "stream": letter.stream,
        **letter.labels,
        "body": _row(letter)[5],
    }
    click.echo("\n".join(page().pairs(values.items())))
    if body is not None:
        click.echo("\n" + "\n".join(map(one_line, _readable(body).split("\n"))))


def _readable(body: bytes) -> str:
    """The body as text: JSON as it is, MessagePack as JSON, bytes that are neither spelled out."""
    import msgspec

    try:
        return body.decode() if body[:1].isspace() or body[:1] == b"{" else _json_of_messagepack(body)
    except (UnicodeDecodeError, msgspec.MsgspecError, ValueError):
        return body.decode(errors="backslashreplace")


def _json_of_messagepack(body: bytes) -> str:
    import msgspec

    return msgspec.json.encode(msgspec.msgpack.decode(body)).decode()


@dead_group.command("retry")
@click.argument("names", metavar="NAME...", nargs=-1)
@setting_options("redis", "queue")
@click.option("--all", "every", is_flag=True, help="All of them, the oldest first.")
@json_option
def retry_command(names: tuple[str, ...], redis: str | None, queue: str | None, every: bool, as_json: bool) -> NoReturn:
    """Add jobs again as if they were new: what is left of their old lives goes. Exit status 1 if one could not be."""
    _one_of(names=bool(names), every=every)
    with inspected(redis, queue) as inspector:
        letters = [*inspector.letters()][::-1] if every else _named(inspector, names)
        outcomes = [(letter, *_retried(inspector, letter)) for letter in letters]
        left = inspector.survey().dead - sum(added is None for _, added, _ in outcomes) if every else 0
    failed = [problem for _, _, problem in outcomes if problem]
    if as_json:
        rows = [
            {"entry": letter.entry, "id": letter.id, "added": added, "error": text} for letter, added, text in outcomes
        ]
        click.echo(json_line(rows))
    else:
        for letter, added, problem in outcomes:
            text = f"{letter.id}: added to {letter.stream} as {added}" if added else f"Error: {problem}"
            click.echo(one_line(text), err=problem is not None)
        if every:
            added = counted(len(outcomes) - len(failed), "job")
            click.echo(f"{added} added again, {len(failed):,} could not be{_beyond(left)}")
    sys.exit(1 if failed else 0)


def _retried(inspector: "Inspector", letter: "Letter") -> tuple[str | None, str | None]:
    """The new entry, or why there is none."""
    from redis.exceptions import ResponseError

    from gllm.faults import is_transient

    name = f"{letter.entry} ({letter.id or 'without an id'})"
    if letter.body_bytes and not letter.kept:
        return None, f"{name}: its body of {size(letter.body_bytes)} was too large to keep; submit it anew"
    try:
        return inspector.requeue(letter), None
    except ResponseError as error:
        if is_transient(error):
            raise
        return None, f"{name}: {_cause(str(error))}"


def _cause(error: str) -> str:
    if error.startswith("GONE"):
        return "somebody has retried or purged it meanwhile"
    if error.startswith("NOBODY"):
        return "it holds no job that could be added again: no usable id, no body, or a stream that no worker looks at"
    if error.startswith("LIVE"):
        return "a job with this id runs or waits again"
    return error


@dead_group.command("purge")
@click.argument("names", metavar="NAME...", nargs=-1)
@setting_options("redis", "queue")
@click.option("--all", "every", is_flag=True, help="All of them.")
@click.option("--older-than", type=Age(), metavar="AGE", help="Those older than 30s, 15m, 12h or 7d.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def purge_command(
    names: tuple[str, ...],
    redis: str | None,
    queue: str | None,
    every: bool,
    older_than: int | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete dead letters for good. Asks before it does, on a terminal; elsewhere it wants --yes."""
    _one_of(names=bool(names), every=every, older_than=older_than is not None)
    with inspected(redis, queue) as inspector:
        letters = _named(inspector, names, all_of_each=True) if names else inspector.letters()
        doomed = [letter.entry for letter in letters if letter.age_ms > (older_than or -1)]
        if doomed and not yes:
            _ask(f"delete {counted(len(doomed), 'dead letter')} of queue {inspector.keys.queue} for good?")
        purged = inspector.purge(doomed)
        left = inspector.survey().dead if every else 0
    click.echo(json_line({"purged": purged}) if as_json else f"{counted(purged, 'dead letter')} deleted{_beyond(left)}")


def _beyond(left: int) -> str:
    """A stream that somebody else has filled is longer than one look."""
    return f"; {left:,} left: do it again" if left > 0 else ""


def _ask(question: str) -> None:
    if not at_a_terminal():
        raise click.UsageError(f"{question} There is no terminal to ask on: --yes says so.")
    click.confirm(question, abort=True, err=True)


def at_a_terminal() -> bool:
    return sys.stdin.isatty()


def _one_of(*, names: bool, **options: bool) -> None:
    if names + sum(options.values()) != 1:
        flags = [f"--{name.replace('_', '-')}".replace("--every", "--all") for name in options]
        raise click.UsageError(f"exactly one expected of NAME... and {', '.join(flags)}")


def _named(inspector: "Inspector", names: Iterable[str], *, all_of_each: bool = False) -> "list[Letter]":
    """The letters that people mean; of a job with several the newest, unless all are wanted. One unknown ends it."""
    found: dict[str, Letter] = {}
    for name in dict.fromkeys(names):
        letters = inspector.letters_named(name)
        if not letters:
            raise click.ClickException(f"no dead letter {one_line(name)} in queue {inspector.keys.queue}")
        found |= {letter.entry: letter for letter in (letters if all_of_each else letters[:1])}
    return list(found.values())
