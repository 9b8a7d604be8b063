"""Where a command's text goes: once, or again and again with --watch; with colours where a person looks on."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from worker.commands.options import Command, Number
from worker.commands.tables import Page
from worker.terminal import one_line

EVERY_SECONDS = 2.0
DAY = 86_400.0
_BEGIN, _END = "\033[2J\033[?7l\033[?25l", "\033[?7h\033[?25h"  # no line wrap and no cursor while the screen is redrawn
_HOME, _REST_OF_LINE, _REST = "\033[H", "\033[K", "\033[J"


def reading_options(command: Command) -> Command:
    """--json and --watch."""
    watch: dict[str, Any] = {"is_flag": False, "flag_value": EVERY_SECONDS, "type": Number(0.1, DAY)}
    text = f"Show it anew every so many seconds ({EVERY_SECONDS:g}), until Ctrl-C."
    command = click.option("--watch", "watch", metavar="[SECONDS]", default=None, help=text, **watch)(command)
    return json_option(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="JSON for programs instead of text.")(command)


def page() -> Page:
    """The page that standard output is. Colours only for a person who wants them (NO_COLOR)."""
    if not sys.stdout.isatty():
        return Page()
    coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Page(shutil.get_terminal_size().columns, coloured)


def redrawable() -> bool:
    """Whether standard output is a terminal that takes the commands of `Terminal` and `present`."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def present(draw: Callable[[], str], watch: float | None) -> None:
    """Writes what `draw` returns, once or every `watch` seconds.

    While watching, a lost Redis is only mentioned: on the screen, else on standard error, so that JSON stays JSON.
    """
    if watch is None:
        click.echo(draw(), color=True)  # a pipe gets every character, also what looks like a colour
        return
    on_screen = redrawable()
    try:
        click.echo(_BEGIN if on_screen else "", nl=False)
        while True:
            text, lost = _drawn(draw)
            click.echo(_redrawn(text) if on_screen else text, nl=not on_screen, err=lost and not on_screen, color=True)
            time.sleep(watch)
    except KeyboardInterrupt:
        pass  # how one stops watching
    finally:
        click.echo(_END if on_screen else "", nl=False)


def _drawn(draw: Callable[[], str]) -> tuple[str, bool]:
    """The text, and whether it only says that Redis is lost."""
    from redis.exceptions import RedisError

    try:
        return draw(), False
    except RedisError as error:
        return one_line(f"Redis: {error}"), True


def _redrawn(text: str) -> str:
    """The text over what stood there before; what is below the screen's last line is left out."""
    lines = text.splitlines()[: shutil.get_terminal_size().lines - 1]
    return _HOME + "".join(f"{line}{_REST_OF_LINE}\n" for line in lines) + _REST
