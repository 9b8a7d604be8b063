"""Plain text for people in aligned columns. Pure functions; whatever they are given is made visible."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import click
from msgspec import Struct

from worker.terminal import one_line

GAP = "  "
LEAST = 8  # characters that a shortened column keeps
MOST = 130  # and has where there is no limit: ids have 128 at most, but anybody may write longer ones into a queue


class Column(Struct, frozen=True):
    """`shrinks`: may be shortened where the terminal is too narrow."""

    title: str
    right: bool = False
    shrinks: bool = False


class Cell(NamedTuple):
    """A text, and the colour it has on a terminal."""

    text: str
    colour: str | None = None


class Page(Struct, frozen=True):
    """Where text goes: its width (None: no limit) and whether it may have colours."""

    width: int | None = None
    coloured: bool = False

    def paint(self, text: str, colour: str | None, *, bold: bool = False) -> str:
        return click.style(text, fg=colour, bold=bold or None) if self.coloured and (colour or bold) else text

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]]) -> list[str]:
        """The lines of a table with its head."""
        cells = [[_cell(value) for value in row] for row in rows]
        widths = self._widths(columns, cells)
        head = [Cell(column.title) for column in columns]
        lines = [self._line(columns, widths, row) for row in cells]
        return [self.paint(self._line(columns, widths, head), None, bold=True), *lines]

    def pairs(self, values: Iterable[tuple[str, str | Cell | None]]) -> list[str]:
        """`name  value` lines; those without a value are left out."""
        shown = [(name, _cell(value)) for name, value in values if value is not None]
        width = max((len(name) for name, _ in shown), default=0)
        return [
            self.paint(f"{name:<{width}}", None, bold=True) + GAP + self.paint(cell.text, cell.colour)
            for name, cell in shown
        ]

    def _widths(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[int]:
        widths = [
            max(len(column.title), *(columns_of(row[at].text) for row in rows), 0) for at, column in enumerate(columns)
        ]
        shrinking = [at for at, column in enumerate(columns) if column.shrinks]
        for at in shrinking:
            if at < len(columns) - 1:  # the last one pushes nothing away
                widths[at] = min(widths[at], MOST)
        while self.width is not None and shrinking and sum(widths) + len(GAP) * (len(widths) - 1) > self.width:
            widest = max(shrinking, key=lambda at: widths[at])
            if widths[widest] <= LEAST:
                break
            widths[widest] -= 1
        return widths

    def _line(self, columns: Sequence[Column], widths: Sequence[int], row: Sequence[Cell]) -> str:
        parts: list[str] = []
        for column, width, cell in zip(columns, widths, row, strict=True):
            text = fit(cell.text, width)
            pad = " " * (width - columns_of(text))
            parts.append(pad + self.paint(text, cell.colour) if column.right else self.paint(text, cell.colour) + pad)
        return GAP.join(parts).rstrip()


def _cell(value: str | Cell) -> Cell:
    text, colour = value if isinstance(value, Cell) else (value, None)
    return Cell(one_line(text), colour)


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: East Asian wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)


def fit(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis."""
    if columns_of(text) <= width:
        return text
    while columns_of(text) > width - 1:
        text = text[:-1]
    return text + "…"
