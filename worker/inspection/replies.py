"""A reply as far as it is written, read as a client would read it."""

from collections.abc import Iterator
from typing import cast

from redis import Redis

from gllm.keys import Keys
from gllm.protocol import ReplyEvent
from gllm.reply import Cursor, ReplyError, read_entry
from worker.inspection.records import EventRow, ReplyView
from worker.inspection.scripts import text

PAGE = 128
MAX_ENTRIES = 10_000  # of one reply; a worker merges tokens, so this is a long one

Raw = tuple[bytes, dict[bytes, bytes]]


def read_reply(redis: Redis, keys: Keys, job_id: str, life_ms: int | None) -> ReplyView:
    """Reads `out:<id>` in pages. What no client could read becomes the `problem`, and ends the text."""
    cursor, rows, parts = Cursor(), list[EventRow](), list[str]()
    problem, characters = None, 0
    for entry, fields in _entries(redis, keys.out(job_id)):
        try:
            name, event = read_entry(entry, fields)
        except ReplyError as error:
            problem = problem or str(error)
            rows.append(EventRow(entry=entry.decode(), raw=str({text(k): text(v) for k, v in fields.items()})))
            continue
        rows.append(EventRow(entry=name, event=event))
        if problem is None:
            problem = _take(cursor, name, event, parts)
    characters = sum(map(len, parts))
    return ReplyView(
        entries=len(rows),
        life_ms=life_ms,
        tokens=cursor.n,
        characters=characters,
        text="".join(parts),
        events=rows,
        problem=problem or (f"only its first {MAX_ENTRIES} entries were read" if len(rows) == MAX_ENTRIES else None),
    )


def _take(cursor: Cursor, entry: str, event: ReplyEvent, parts: list[str]) -> str | None:
    """Adds what the event says to the text; the text of an error that a client would see."""
    try:
        reply = cursor.take(entry, event)
    except ReplyError as error:
        return f"{type(error).__name__}: {error}"
    if reply is not None:
        parts.append(reply.text)
    return None


def _entries(redis: Redis, out: str) -> Iterator[Raw]:
    start, read = "-", 0
    while read < MAX_ENTRIES:
        page = cast(list[Raw], redis.xrange(out, min=start, count=PAGE))
        yield from page[: MAX_ENTRIES - read]
        read += len(page)
        if len(page) < PAGE:
            return
        start = f"({page[-1][0].decode()}"
