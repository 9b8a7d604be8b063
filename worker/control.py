"""Control tokens inside text: finding what spells one, and hiding it from the tokenizer."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from worker.stops import Symbol


class ControlTokens:
    """The control tokens of a tokenizer, by how they are spelled. Finds the first and, there, the longest.

    Some vocabularies have thousands of them, so they are found by their first two characters, then by length.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {content: number for content, number in ids.items() if content}
        self._lengths = sorted({len(content) for content in self._ids}, reverse=True)
        starts = sorted({content[:2] for content in self._ids}, key=len, reverse=True)
        self._start = re.compile("|".join(map(re.escape, starts)) or r"(?!)")
        ends = sorted({re.escape(start[0]) for start in starts})
        self._beginning = re.compile("|".join([*map(re.escape, starts), *(rf"{end}\Z" for end in ends)]) or r"(?!)")

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where a text spells control tokens: (start, end), left to right, without overlap."""
        position = 0
        while found := self._start.search(text, position):
            start = found.start()
            length = self._length_at(text, start)
            if length:
                yield start, start + length
            position = start + (length or 1)

    def beginnings(self, text: str) -> Iterator[tuple[int, int]]:
        """Where a text could begin one: the first two characters of any, or the first one at its very end."""
        return (found.span() for found in self._beginning.finditer(text))

    def begins_in(self, value: Any) -> bool:
        """Whether any string inside JSON-like data has a beginning."""
        return any(self._beginning.search(text) is not None for text in strings(value))

    def found(self, text: str) -> list[str]:
        """The control tokens that a text spells, in order."""
        return [text[start:end] for start, end in self.spans(text)]

    def symbols(self, text: str) -> tuple[Symbol, ...]:
        """The characters of a text, with an id in place of each control token."""
        symbols: list[Symbol] = []
        position = 0
        for start, end in self.spans(text):
            symbols += [*text[position:start], self._ids[text[start:end]]]
            position = end
        return (*symbols, *text[position:])

    def _length_at(self, text: str, start: int) -> int:
        return next((length for length in self._lengths if text[start : start + length] in self._ids), 0)


class PromptError(ValueError):
    """A prompt that cannot become ids. The message says why; whoever knows the field puts its name before it."""


class Hiding:
    """Puts a placeholder, one private character, in place of each span, and remembers which stands for what.

    A template may move, repeat or drop such a character, but cannot take it apart. A placeholder that the text brings
    along is hidden like a span, so nobody can write one. Placeholders are consecutive characters.
    """

    def __init__(self, placeholders: Sequence[str]) -> None:
        self._free = iter(placeholders)
        self._mark_of: dict[str, str] = {}
        self._own = re.compile(f"[{placeholders[0]}-{placeholders[-1]}]")

    @property
    def hidden(self) -> dict[str, str]:
        """What each placeholder stands for."""
        return {mark: span for span, mark in self._mark_of.items()}

    def hide(self, text: str, spans: Iterable[tuple[int, int]]) -> str:
        parts: list[str] = []
        position = 0
        for start, end in spans:
            parts += [self._hide_own(text[position:start]), self._mark(text[start:end])]
            position = end
        return "".join([*parts, self._hide_own(text[position:])])

    def _hide_own(self, text: str) -> str:
        return self._own.sub(lambda found: self._mark(found[0]), text)

    def _mark(self, span: str) -> str:
        """The span's placeholder. Raises PromptError when there are more different spans than placeholders."""
        if span not in self._mark_of:
            mark = next(self._free, None)
            if mark is None:
                raise PromptError(f"more than {len(self._mark_of)} different control strings in the text")
            self._mark_of[span] = mark
        return self._mark_of[span]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like data with every string in it, keys included, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def strings(value: Any) -> Iterator[str]:
    """Every string inside JSON-like data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in (*value.keys(), *value.values()):
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)
