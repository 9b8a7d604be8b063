"""Finding stop strings in a stream, and how much of the stream may still become one (Aho and Corasick, 1975)."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

Symbol = str | int  # a character of the text, or the id of a control token, which has no text of its own


class Stop(NamedTuple):
    """A stop string as it was given, and how it reads in the stream. `characters` counts those that are text."""

    text: str
    symbols: tuple[Symbol, ...]

    @property
    def characters(self) -> int:
        return sum(isinstance(symbol, str) for symbol in self.symbols)


class _Node:
    """A beginning of some stop strings. `held`: how many characters the longest end of the text that may go on has."""

    __slots__ = ("back", "characters", "held", "matched", "next")

    def __init__(self, characters: int) -> None:
        self.next: dict[Symbol, _Node] = {}
        self.back: _Node | None = None
        self.characters = characters
        self.matched: Stop | None = None
        self.held = 0


class StopMatcher:
    """Reads a stream symbol by symbol, in amortised constant time, however many stop strings there are.

    Of several that end at one symbol the longest is reported, so that nothing of any of them is left in the text.
    """

    def __init__(self, stops: Sequence[Stop]) -> None:
        self._root = _Node(0)
        for stop in stops:
            self._insert(stop)
        self._link()
        self._at = self._root

    @property
    def held(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return self._at.held

    def step(self, symbol: Symbol) -> Stop | None:
        """Read on; the stop string that ends with this symbol, if one does."""
        node = self._at
        while node.back is not None and symbol not in node.next:
            node = node.back
        self._at = node.next.get(symbol, self._root)
        return self._at.matched

    def _insert(self, stop: Stop) -> None:
        node = self._root
        for symbol in stop.symbols:
            if symbol not in node.next:
                node.next[symbol] = _Node(node.characters + isinstance(symbol, str))
            node = node.next[symbol]
        assert node is not self._root, "a stop string is empty"
        node.matched = node.matched or stop

    def _link(self) -> None:
        """Breadth first, give each node its longest proper end that is a beginning too, and what follows from it."""
        queue = deque([self._root])
        while queue:
            node = queue.popleft()
            for symbol, child in node.next.items():
                child.back = self._back_of(node, symbol)
                child.matched = child.matched or child.back.matched
                child.held = child.characters if child.next else child.back.held
                queue.append(child)

    def _back_of(self, parent: _Node, symbol: Symbol) -> _Node:
        node = parent.back
        while node is not None and symbol not in node.next:
            node = node.back
        return self._root if node is None else node.next[symbol]


class TextMatcher(StopMatcher):
    """A matcher of what a reader sees: it reads over control tokens, which are no part of the text."""

    def step(self, symbol: Symbol) -> Stop | None:
        return super().step(symbol) if isinstance(symbol, str) else None
