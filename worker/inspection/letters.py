"""Dead letters: what they say, and giving them another life or none."""

import re
from collections.abc import Iterator
from typing import cast

from redis import Redis

from gllm.keys import Keys
from worker.inspection.records import Letter
from worker.inspection.scripts import Peeked, entry_ms, pages, peek

MAX_LETTERS = 10_000  # workers keep about 1,000; more are somebody else's, and a search has to end
PURGED_AT_ONCE = 1000
_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_LABELS = ("traceparent", "tenant", "affinity", "body_sha1")


def every(redis: Redis, keys: Keys) -> Iterator[Letter]:
    """Dead letters, the newest first."""
    now_ms = _now_ms(redis)
    for item in pages(redis, keys, "dead", "+", "-", MAX_LETTERS):
        yield _letter(item, now_ms)


def named(redis: Redis, keys: Keys, name: str) -> list[Letter]:
    """The letters that a person means: the one with this entry id, else those of this job, the newest first."""
    if _ENTRY_ID.fullmatch(name):
        found, _ = peek(redis, keys, 1, [("dead", name, name)])
        if found:
            return [_letter(found[0], _now_ms(redis))]
    return letters_about(redis, keys, name)


def letters_about(redis: Redis, keys: Keys, job_id: str) -> list[Letter]:
    """The letters of one job, the newest first; more than one when its id was used again."""
    return [letter for letter in every(redis, keys) if letter.id == job_id]


def body_of(redis: Redis, keys: Keys, letter: Letter) -> bytes | None:
    """The body that a letter keeps (64 KiB at most); None where it keeps none."""
    found = cast(list[tuple[bytes, dict[bytes, bytes]]], redis.xrange(keys.dead, letter.entry, letter.entry))
    return found[0][1].get(b"body") if found and letter.kept else None


def purge(redis: Redis, keys: Keys, entries: list[str]) -> int:
    """Deletes letters by entry id; how many there were."""
    batches = [entries[at : at + PURGED_AT_ONCE] for at in range(0, len(entries), PURGED_AT_ONCE)]
    return sum(cast(int, redis.xdel(keys.dead, *batch)) for batch in batches)


def _now_ms(redis: Redis) -> int:
    seconds, micros = cast(tuple[int, int], redis.time())
    return seconds * 1000 + micros // 1000


def _letter(item: Peeked, now_ms: int) -> Letter:
    fields = item.fields
    attempts, size = fields.get("attempts", ""), fields.get("body_bytes", "")
    return Letter(
        entry=item.entry,
        id=fields.get("id", ""),
        reason=fields.get("reason", ""),
        error=fields.get("error", ""),
        attempts=int(attempts) if attempts.isdecimal() else 0,
        worker=fields.get("worker", ""),
        stream=fields.get("stream", ""),
        age_ms=max(0, now_ms - entry_ms(item.entry)),
        kept=bool(item.body_bytes),
        body_bytes=int(size) if size.isdecimal() else item.body_bytes,
        labels={name: fields[name] for name in _LABELS if name in fields},
    )
