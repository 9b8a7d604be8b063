"""What waits in the streams of a queue, added up by priority."""

from collections.abc import Iterable
from typing import NamedTuple

from gllm.keys import PRIORITIES


class Backlog(NamedTuple):
    """Entries that nobody holds; `new` of them were never handed out.

    `oldest_ms`: when the oldest was submitted, on Redis' clock; None where there is none, or nobody looked.
    """

    waiting: int = 0
    new: int = 0
    oldest_ms: int | None = None

    def __add__(self, other: "Backlog") -> "Backlog":  # type: ignore[override]
        known = [ms for ms in (self.oldest_ms, other.oldest_ms) if ms is not None]
        return Backlog(self.waiting + other.waiting, self.new + other.new, min(known, default=None))


def by_priority(streams: Iterable[tuple[str, Backlog]]) -> dict[str, Backlog]:
    """Sums over the shards of each priority; zeros for one without any. `streams` are short names."""
    sums: dict[str, Backlog] = dict.fromkeys(PRIORITIES, Backlog())
    for stream, backlog in streams:
        sums[stream.split(":")[1]] += backlog
    return sums


def submitted_ms(entry: bytes) -> int | None:
    """When an entry was added, by its id; None for no id."""
    return int(entry.partition(b"-")[0]) if entry else None
