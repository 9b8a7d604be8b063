"""From tokens to published text: detokenising, stop strings and the end of a reply.

The text is a pure function of the prompt and the tokens: decode(prompt + tokens) with decode(prompt) taken off, control
tokens skipped, no clean-up. So a worker that takes over a reply pushes the tokens that were published through the same
class and goes on with the same text, at the same offsets.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from worker.pieces import TextDecoder
from worker.stops import Stop, StopMatcher, Symbol, TextMatcher
from worker.tokenizer import Tokenizer


class Ending(NamedTuple):
    """Why a reply ended. `stop` is the stop string, or the id of a stop id, or None (end of sequence, or length)."""

    finish_reason: Literal["stop", "length"]
    stop: str | int | None = None


class ReplyText:
    """The text of one reply, token by token, and where it ends.

    `ids`: the tokens of the reply, the one that ended it included. `offsets[i]`: how many code points are published
    once `ids[:i + 1]` are. What may begin a stop string, and a character that still lacks bytes, is held back.

    `end_ids` (end of sequence) and `stop_ids` end the reply without a text of their own unless `include_stop` is set;
    a control token never has text, but it ends the reply also where `stops` spell it out. Nothing ends the reply
    before `min_tokens` tokens are complete, except `max_tokens`.

    `room` is how many tokens this worker can hold. It ends the reply too, but takes no token away: another worker, with
    more of it, may have published them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        end_ids: frozenset[int] = frozenset(),
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        max_tokens: int | None = None,
        room: int | None = None,
    ) -> None:
        self.ids: list[int] = []
        self.offsets: list[int] = []
        self.ending: Ending | None = None
        self._published: list[str] = []  # what each token let out
        self._held = ""
        self._decoder = TextDecoder(tokenizer.pieces, prompt_ids)
        self._special_ids = tokenizer.special_ids
        self._matchers = _matchers(tokenizer, stops)
        self._include_stop = include_stop
        self._end_ids, self._stop_ids = end_ids, stop_ids
        self._min_tokens, self._max_tokens, self._room = min_tokens, max_tokens, room

    @property
    def text(self) -> str:
        """All that may be published so far. Costs its length: a publisher asks for `between`."""
        return "".join(self._published)

    def between(self, first: int, last: int) -> str:
        """The text that the tokens `ids[first:last]` let out; it begins at offset `offsets[first - 1]`."""
        return "".join(self._published[first:last])

    def at(self, count: int) -> int:
        """How many code points are published once the first `count` tokens are."""
        return self.offsets[count - 1] if count else 0

    def push(self, ids: Iterable[int]) -> Ending | None:
        """Append tokens up to the one that ends the reply. Returns how it ended, once it has."""
        for token in ids:
            if self.ending is not None:
                break
            self._append(token)
        if self._room is not None and len(self.ids) >= self._room:
            self.ending = self.ending or Ending("length")
        return self.ending

    def tail(self) -> str:
        """What is held back and belongs to the reply if it has no more tokens, whatever ended it."""
        if self.ending is not None and isinstance(self.ending.stop, str):
            return ""
        return self._held + self._decoder.flush()

    def _append(self, token: int) -> None:
        self.ids.append(token)
        may_end = len(self.ids) > self._min_tokens
        by_id = self._ended_by(token) if may_end else None
        released, stop = "", None
        if by_id is None or self._include_stop or token in self._special_ids:
            released, stop = self._read(token, may_end)
        self._published.append(released)
        self.offsets.append(self.at(len(self.offsets)) + len(released))
        self.ending = Ending("stop", stop) if stop is not None else by_id or self._out_of_length()

    def _ended_by(self, token: int) -> Ending | None:
        if token in self._stop_ids:
            return Ending("stop", token)
        return Ending("stop") if token in self._end_ids else None

    def _out_of_length(self) -> Ending | None:
        return Ending("length") if self._max_tokens is not None and len(self.ids) >= self._max_tokens else None

    def _read(self, token: int, may_end: bool) -> tuple[str, str | None]:
        """The text that the token lets out, and the stop string that it completes."""
        piece = self._decoder.push(token)
        if not self._matchers:
            return piece, None
        symbols: Iterable[Symbol] = (token,) if token in self._special_ids else piece
        start, text = len(self._held), self._held + piece
        for end, symbol in enumerate(symbols, start + 1):
            stop = self._step(symbol)
            if stop is not None and may_end:
                return self._cut(text[:end], stop), stop.text
        keep = len(text) - max(matcher.held for matcher in self._matchers)
        self._held = text[keep:]
        return text[:keep], None

    def _step(self, symbol: Symbol) -> Stop | None:
        found = [stop for matcher in self._matchers if (stop := matcher.step(symbol)) is not None]
        return max(found, key=lambda stop: stop.characters, default=None)

    def _cut(self, text: str, stop: Stop) -> str:
        self._held = ""
        return text if self._include_stop else text[: len(text) - stop.characters]


def _matchers(tokenizer: Tokenizer, stops: Sequence[str]) -> list[StopMatcher]:
    """One matcher for the text, which control tokens do not interrupt, and one for stops that spell control tokens."""
    plain = [Stop(text, tuple(text)) for text in stops]
    marked = [Stop(text, symbols) for text in stops if (symbols := tokenizer.symbols(text)) != tuple(text)]
    return [kind(group) for kind, group in ((TextMatcher, plain), (StopMatcher, marked)) if group]
