"""`gllm top`: a queue as it lives: workers, jobs, tokens a second, hit rate. Reads Redis alone, not the workers.

A look is a handful of round trips, whatever the queue's length: the survey, the workers' heartbeats (the newest 1,000),
and the first jobs (`--limit`).
"""

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from worker.commands.access import inspected
from worker.commands.options import Number, setting_options
from worker.commands.screen import DAY, json_option, page, redrawable
from worker.terminal import json_line, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker.commands.top_page import Order
    from worker.commands.top_rates import Look, Watch
    from worker.commands.top_screen import Terminal
    from worker.inspection.inspector import Inspector

EVERY_SECONDS = 1.0
NEXT_ORDER = "s"


@click.command("top")
@setting_options("redis", "queue")
@click.option(
    "--interval",
    type=Number(0.1, DAY),
    default=EVERY_SECONDS,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--count", type=click.IntRange(1), help="End after so many looks; default: with q or Ctrl-C.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most jobs to look at.")
@click.option(
    "--sort",
    type=click.Choice(["turn", "age", "tokens", "rate"]),
    default="turn",
    show_default=True,
    help="Which of these jobs come first.",
)
@json_option
def top_command(
    redis: str | None, queue: str | None, interval: float, count: int | None, limit: int, sort: "Order", as_json: bool
) -> None:
    """A live screen of workers and jobs, tokens a second and hit rate. Keys: q leaves, s sorts the jobs otherwise.

    Without a terminal, and with --json, one page (or line) per look. A worker's numbers come with its heartbeats, every
    third of a lease: its rates are known after two of them.
    """
    from worker.commands.top_rates import Watch

    with inspected(redis, queue) as inspector:
        inspector.survey()  # what is wrong from the start is an error; what goes wrong later is only shown
        live = Live(inspector, Watch(), limit, sort, interval)
        looks = range(count) if count else itertools.count()
        try:
            if redrawable() and not as_json:
                _on_terminal(live, looks, interval)
            else:
                _in_lines(live, live.json_text if as_json else live.text, looks, interval)
        except KeyboardInterrupt:
            pass  # how one stops watching


class Live:
    """The newest look at a queue and how it is shown. A lost Redis leaves the last one standing, under the error."""

    def __init__(self, inspector: "Inspector", watch: "Watch", limit: int, order: "Order", interval: float) -> None:
        self._inspector = inspector
        self._watch = watch
        self._limit = limit
        self._order: Order = order
        self._interval = interval
        self._look: Look | None = None
        self._error = ""

    def look(self) -> None:
        from redis.exceptions import RedisError

        try:
            self._look, self._error = self._read(), ""
            self._watch.take(self._look)
        except RedisError as error:
            self._error = one_line(f"Redis: {error}")

    def sort_otherwise(self) -> None:
        from worker.commands.top_page import ORDERS

        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]

    def text(self) -> str:
        return "\n".join([*self._lines(None), ""])

    def drawing(self, height: int) -> list[str]:
        """Exactly `height` lines; the last one tells the keys."""
        lines = self._lines(height - 1)[: height - 1]
        foot = f"every {self._interval:g} s; q leaves, s sorts jobs otherwise (now by {self._order})"
        return [*lines, *[""] * (height - 1 - len(lines)), foot]

    def _lines(self, height: int | None) -> list[str]:
        from worker.commands.top_page import Layout, screen

        to = page()
        error = [to.paint(self._error, "red"), ""] if self._error else []
        room = None if height is None else height - len(error)
        shown = screen(self._look, self._watch, Layout(to, room, self._order)) if self._look else []
        return [*error, *shown]

    def json_text(self) -> str:
        from worker.commands.top_page import as_json

        if self._error or self._look is None:
            return json_line({"queue": self._inspector.keys.queue, "error": self._error})
        return json_line(as_json(self._look, self._watch, self._order))

    def _read(self) -> "Look":
        from worker.commands.top_rates import Look

        survey = self._inspector.survey()
        workers = self._inspector.workers(survey)
        return Look(
            now_ms=survey.now_ms,
            queue=self._inspector.queue(survey, workers),
            workers=workers,
            jobs=self._inspector.jobs(self._limit, survey, workers),
        )


def _in_lines(live: Live, show: Callable[[], str], looks: "Iterable[int]", interval: float) -> None:
    for number in looks:
        if number:
            time.sleep(interval)
        live.look()
        click.echo(show())


def _on_terminal(live: Live, looks: "Iterable[int]", interval: float) -> None:
    from worker.commands.top_screen import Terminal

    with Terminal() as terminal:
        for _ in looks:
            until = time.monotonic() + interval
            live.look()
            if not _shown(terminal, live, until):
                return


def _shown(terminal: "Terminal", live: Live, until: float) -> bool:
    """Draws, and does what keys say, until it is time for the next look. False when it is time to leave."""
    from worker.commands.top_screen import QUIT

    while True:
        terminal.draw(live.drawing(terminal.size.lines))
        key = terminal.wait(until - time.monotonic())
        if key == QUIT:
            return False
        if key == NEXT_ORDER:
            live.sort_otherwise()
        elif time.monotonic() >= until:
            return True
