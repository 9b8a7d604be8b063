"""The scripts that a person's commands call, for plain code: EVALSHA, and EVAL when the server does not know them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import NoScriptError

from gllm.keys import Keys
from worker.scripts import Script

PAGE = 250  # entries a peek, so that no call keeps the server for long

Range = tuple[str, str, str]

_peek = Script("peek")
_requeue = Script("requeue")
_survey = Script("groups", "survey")


class Peeked(Struct, frozen=True):
    """A stream entry without its body. `range` is the number of the range that it was found in, from 0."""

    range: int
    entry: str
    body_bytes: int | None
    fields: dict[str, str]

    @property
    def ms(self) -> int:
        """When it was added, by the server's clock."""
        return entry_ms(self.entry)


def survey(redis: Redis, keys: Keys) -> list[Any]:
    """The raw reply of survey.lua."""
    return _call(redis, _survey, keys, ())


def peek(redis: Redis, keys: Keys, limit: int, ranges: Sequence[Range]) -> tuple[list[Peeked], bool]:
    """At most `limit` entries of ranges (stream, start, end); whether it stopped early, which bounds the bytes."""
    if limit < 1 or not ranges:
        return [], False
    more, rows = _call(redis, _peek, keys, (limit, *(part for range_ in ranges for part in range_)))
    return [_peeked(row) for row in rows], bool(more)


def pages(redis: Redis, keys: Keys, stream: str, start: str, end: str, limit: int) -> Iterator[Peeked]:
    """Entries one after the other, in pages, at most `limit` of them."""
    left = limit
    while left > 0:
        wanted = min(PAGE, left)
        found, more = peek(redis, keys, wanted, [(stream, start, end)])
        yield from found
        if not found or (len(found) < wanted and not more):
            return
        left -= len(found)
        start = f"({found[-1].entry}"


def requeue(redis: Redis, keys: Keys, letter: str) -> str:
    """Adds a dead letter's job again; the new entry's id. Raises ResponseError GONE, NOBODY or LIVE."""
    return text(_call(redis, _requeue, keys, (letter,)))


def answers(pipeline: Pipeline) -> list[Any]:
    """Runs a pipeline. What a key of another type or a lost group causes stays in its place; other errors are raised,
    because what this user may not see, or the server cannot say now, is not nothing.
    """
    got: list[Any] = pipeline.execute(raise_on_error=False)
    for answer in got:
        if isinstance(answer, Exception) and not str(answer).startswith(("WRONGTYPE", "NOGROUP")):
            raise answer
    return got


def text(value: bytes) -> str:
    """Bytes of somebody's making; what is no UTF-8 is spelled out, so that two values never look alike."""
    return value.decode(errors="backslashreplace")


def entry_ms(entry: str) -> int:
    """The milliseconds in an entry id; 0 for what is none."""
    head = entry.partition("-")[0]
    return int(head) if head.isdecimal() and len(head) <= 20 else 0


def _call(redis: Redis, script: Script, keys: Keys, args: Iterable[Any]) -> Any:
    try:
        return redis.evalsha(script.sha, 1, keys.base, *args)
    except NoScriptError:
        return redis.eval(script.text, 1, keys.base, *args)


def _peeked(row: list[Any]) -> Peeked:
    number, entry, size, *flat = row
    fields = {text(name): text(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
    return Peeked(number - 1, entry.decode(), None if size < 0 else size, fields)
