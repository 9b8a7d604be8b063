"""How the demo shows its chats: panes on a terminal (with `rich`), plain lines elsewhere, and a table at the end."""

import importlib.util
import os
import sys
import textwrap
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from worker.commands.tables import Column, Page
from worker.demo_chats import Chat
from worker.terminal import visible

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.table import Table

LINE_CHARACTERS = 88  # a plain line is written when this much of an answer has come, or at its line breaks
PANES_PER_ROW = 2
FRAMES_PER_SECOND = 5
LEAST_ROWS, LEAST_COLUMNS = 20, 60  # a smaller terminal has no room for eight panes
COLUMNS = (
    Column("#", right=True),
    Column("question"),
    *(Column(title, right=True) for title in ("first token", "tokens", "tokens/s", "prompt", "cached")),
    Column("end"),
)


class Screen(ABC):
    """Shows chats while they are answered, inside of its `with` block."""

    @abstractmethod
    def show(self, chat: Chat) -> None:
        """To be called whenever a chat has got an event."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def screen_for(chats: list[Chat], *, plain: bool) -> Screen:
    """Panes where they can be had, else plain lines."""
    size = os.get_terminal_size() if sys.stdout.isatty() else os.terminal_size((0, 0))
    roomy = size.lines >= LEAST_ROWS and size.columns >= LEAST_COLUMNS and os.environ.get("TERM") != "dumb"
    return PlainScreen() if plain or not roomy or not importlib.util.find_spec("rich") else PaneScreen(chats)


class PlainScreen(Screen):
    """Whole lines with the chat's number in front, written as they fill up."""

    def __init__(self) -> None:
        self._shown: dict[int, int] = {}

    def close(self) -> None:
        click.echo()

    def show(self, chat: Chat) -> None:
        if chat.number not in self._shown:
            self._shown[chat.number] = 0
            click.echo(f"[{chat.number}] > {chat.question}")
        rest = chat.text[self._shown[chat.number] :]
        while line := _full_line(rest, last=chat.end is not None):
            self._shown[chat.number] += len(line)
            rest = rest[len(line) :]
            if line.strip():
                click.echo(f"[{chat.number}] {visible(line.strip())}")
        if chat.end is not None and not chat.well:
            click.echo(f"[{chat.number}] ended with {chat.outcome}")


def _full_line(text: str, *, last: bool) -> str:
    """The first line of the text if it is complete: by its break, by its length, or because nothing follows."""
    line, ended, _ = text.partition("\n")
    if ended and len(line) <= LINE_CHARACTERS:
        return line + ended
    if len(line) > LINE_CHARACTERS:
        cut = line.rfind(" ", 1, LINE_CHARACTERS)
        return line[: cut + 1] if cut > 0 else line[:LINE_CHARACTERS]
    return line if last else ""


class PaneScreen(Screen):
    """A pane per chat with the end of its answer, redrawn in place; the whole answers stay on the screen afterwards."""

    def __init__(self, chats: list[Chat]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._chats = chats
        self._console = Console()
        self._live = Live(
            console=self._console, get_renderable=self._grid, refresh_per_second=FRAMES_PER_SECOND, transient=True
        )
        self._live.start()

    def close(self) -> None:
        self._live.stop()
        for chat in self._chats:
            click.echo(f"[{chat.number}] {click.style(chat.question, bold=True)}")
            click.echo(textwrap.indent("\n".join(_wrapped(chat.text.strip(), self._console.width - 4)), "    ") + "\n")

    def show(self, chat: Chat) -> None:
        """Nothing to do: the screen is drawn a few times a second; once per token would take the engine's CPU time."""

    def _grid(self) -> "Table":
        from rich.table import Table

        grid = Table.grid(expand=True)
        for _ in range(PANES_PER_ROW):
            grid.add_column(ratio=1)
        panes = [self._pane(one) for one in self._chats]
        for row in range(0, len(panes), PANES_PER_ROW):
            grid.add_row(*panes[row : row + PANES_PER_ROW])
        return grid

    def _pane(self, chat: Chat) -> "Panel":
        from rich.panel import Panel
        from rich.text import Text

        rows = -(-len(self._chats) // PANES_PER_ROW)
        height = min(8, (self._console.height - 1) // rows)
        width = self._console.width // PANES_PER_ROW - 4
        lines = _wrapped(chat.text, width)
        colour = "green" if chat.well else "red" if chat.end else "cyan" if chat.tokens else "dim"
        title = f"[bold]{chat.number}[/] {chat.question}"
        return Panel(Text("\n".join(lines[-(height - 2) :])), title=title, height=height, border_style=colour)


def _wrapped(text: str, width: int) -> list[str]:
    return [part for line in text.splitlines() for part in textwrap.wrap(visible(line), width) or [""]]


def table(chats: list[Chat]) -> str:
    """What each chat took, and the share of prompt tokens that the prefix cache served."""
    note = "(first token and tokens/s count from the moment the job was submitted)"
    return "\n".join([*Page().table(COLUMNS, map(_row, chats)), note, "", _summary(chats)])


def _row(chat: Chat) -> tuple[str, ...]:
    first = "-" if chat.seconds_to_first is None else f"{chat.seconds_to_first:.2f} s"
    speed = "-" if chat.tokens_per_second is None else f"{chat.tokens_per_second:.1f}"
    question = textwrap.shorten(chat.question, 44, placeholder=" …")
    counts = (str(chat.tokens), speed, str(chat.prompt_tokens), str(chat.cached_tokens))
    return (str(chat.number), question, first, *counts, chat.outcome.partition(":")[0])


def _summary(chats: list[Chat]) -> str:
    prompts, cached = sum(chat.prompt_tokens for chat in chats), sum(chat.cached_tokens for chat in chats)
    tokens = sum(chat.tokens for chat in chats)
    ends = [chat.last_at for chat in chats if chat.last_at is not None]
    seconds = max(ends) - min(chat.submitted for chat in chats) if ends else 0.0
    rate = f"{cached / prompts:.1%}" if prompts else "none"
    speed = f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s together" if seconds else "no tokens"
    return f"Prefix cache hit rate: {rate} ({cached} of {prompts} prompt tokens). {speed}."
