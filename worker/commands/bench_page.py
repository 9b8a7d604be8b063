"""What `gllm bench` shows: a line of progress while it runs, and its table. Pure functions but for `Progress`."""

import sys
import time
from collections.abc import Iterator

import click

from worker.commands.screen import page
from worker.commands.tables import Cell, Column, Page
from worker.humane import NOTHING, counted, duration
from worker.load.figures import Figures, Latency
from worker.load.run import Load
from worker.terminal import one_line

BAR = 24
NAMES = {
    "lateness": "sent late",
    "submit": "submit",
    "queue_wait": "queue wait",
    "first_token": "first token",
    "inter_token": "between tokens",
    "end_to_end": "end to end",
}
COLUMNS = (
    Column("LATENCY"),
    *(Column(title, right=True) for title in ("COUNT", "MEAN", "P50", "P90", "P99", "LONGEST")),
)
LATE_SECONDS = 0.02  # a generator that is later than this at the 99th percentile measures itself


def report(to: Page, found: Figures, messages: dict[str, str]) -> list[str]:
    """The table, totals, and what went wrong with one message of each kind."""
    rows = [_row(NAMES[name], latency) for name, latency in found.latencies.items()]
    return [*to.table(COLUMNS, rows), "", *to.pairs(_totals(found)), *_errors(to, found, messages)]


def _row(name: str, latency: Latency) -> list[str | Cell]:
    values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.longest)
    return [name, f"{latency.count:,}", *map(seconds, values)]


def seconds(value: float | None) -> str:
    """Like 0.84ms, 12.3ms, 1.24s, 3m20s."""
    if value is None:
        return NOTHING
    ms = 1000 * value
    if ms < 1000:
        return f"{ms:.2f}ms" if ms < 10 else f"{ms:.1f}ms"
    return f"{value:.2f}s" if value < 60 else duration(ms)


def _totals(found: Figures) -> Iterator[tuple[str, str | Cell | None]]:
    yield "time", seconds(found.seconds)
    yield "jobs", f"{counted(found.jobs, 'job')}, {found.well:,} ended well: {found.jobs_per_second:,.2f}/s"
    yield "tokens out", f"{found.tokens:,}: {found.tokens_per_second:,.1f}/s"
    cached = "" if found.hit_rate is None else f"; {found.cached_tokens:,} from the prefix cache: {found.hit_rate:.1%}"
    yield "tokens in", f"{found.prompt_tokens:,}: {found.prompt_tokens_per_second:,.1f}/s{cached}"
    yield "ends", ", ".join(f"{count:,} {name}" for name, count in found.outcomes.items()) or NOTHING
    if found.preemptions or found.resumed:
        yield "disturbed", f"{found.preemptions:,} preemptions, {found.resumed:,} taken up by another worker"
    late = found.latencies["lateness"].p99
    if late is not None and late > LATE_SECONDS:
        text = f"1 of 100 jobs was sent {seconds(late)} late or later: this machine is too busy to make this load"
        yield "warning", Cell(text, "yellow")


def _errors(to: Page, found: Figures, messages: dict[str, str]) -> list[str]:
    return [to.paint(one_line(f"{kind}: {text}"), "red") for kind, text in messages.items() if kind in found.outcomes]


class Progress:
    """One line on standard error, drawn over itself; nothing where that is no terminal."""

    def __init__(self, load: Load, jobs: int | None) -> None:
        self._load = load
        self._jobs = jobs
        self._terminal = sys.stderr.isatty()

    def show(self) -> None:
        if self._terminal:
            click.echo(f"\r\033[K{fit_to_screen(self.line())}", err=True, nl=False)

    def clear(self) -> None:
        if self._terminal:
            click.echo("\r\033[K", err=True, nl=False)

    def line(self) -> str:
        load = self._load
        ended, passed = len(load.records) - load.open, max(1e-9, time.monotonic() - load.began)
        tokens = sum(record.tokens for record in load.records)
        rate = f"{load.open:,} open, {tokens / passed:,.0f} tokens/s, {duration(1000 * passed)}"
        share = self._share(ended, passed)
        bar = "" if share is None else f"[{'#' * round(BAR * share):.<{BAR}}] "
        return f"{bar}{ended:,}{f' of {self._jobs:,}' if self._jobs else ''} jobs, {rate}"

    def _share(self, ended: int, passed: float) -> float | None:
        if self._jobs:
            return min(1.0, ended / self._jobs)
        length = self._load.options.seconds
        return None if length is None else min(1.0, passed / length)


def fit_to_screen(text: str) -> str:
    import shutil

    return text[: shutil.get_terminal_size().columns - 1]


def messages_of(load: Load) -> dict[str, str]:
    """The first message of each kind of end that has one."""
    found: dict[str, str] = {}
    for record in load.records:
        if record.outcome and record.message:
            found.setdefault(record.outcome, f"job {record.id}: {record.message}")
    return found


def printed(load: Load, found: Figures) -> str:
    return "\n".join(report(page(), found, messages_of(load)))
