"""What the scripts are told of jobs that are published, and what they answer, row by row."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

Status = Literal["OK", "CANCEL", "FENCED", "GAP", "GONE", "ERR"]
_json = msgspec.json.Encoder()


class Answer(NamedTuple):
    """What a script says about one row. `n`: the tokens that Redis has; `text`: of an ERR."""

    status: Status
    n: int = 0
    text: str = ""


class AppendRow(NamedTuple):
    """An event to publish: `tokens` first … to, or a `mark` (start, resume) at first = to = n."""

    kind: Literal["tokens", "mark"]
    id: str
    epoch: int
    first: int
    to: int
    event: bytes
    cached_tokens: int | Literal[""] = ""


class FinishRow(NamedTuple):
    """A terminal event for a job whose reply has `n` tokens."""

    id: str
    epoch: int
    n: int
    stream: str
    entry: str
    event: bytes


def wire(rows: Sequence[AppendRow]) -> bytes:
    """As append.lua takes them."""
    texts = [(*map(str, row[:5]), row.event.decode(), str(row.cached_tokens)) for row in rows]
    return _json.encode([text for row in texts for text in row])


def appended(rows: Sequence[AppendRow], reply: bytes) -> list[Answer]:
    """The reply of append.lua, which speaks only of rows with another answer than OK and n = to."""
    found = [Answer("OK", row.to) for row in rows]
    for line in filter(None, _lines(reply)):
        index, _, rest = line.partition(" ")
        found[int(index)] = _counted(rest)
    return found


def answers(reply: bytes) -> list[Answer]:
    """One answer a line: status, n and, after an ERR, its text."""
    return [_counted(line) for line in _lines(reply)]


def answer_of(status: bytes) -> Answer:
    """A status and, after an ERR, its text."""
    word, _, text = status.decode(errors="replace").partition(" ")
    return Answer(word, text=text)  # type: ignore[arg-type]


def _lines(reply: bytes) -> list[str]:
    return reply.decode(errors="replace").split("\n")


def _counted(line: str) -> Answer:
    word, n, *text = line.split(" ", 2)
    return Answer(word, int(n), *text)  # type: ignore[arg-type]
