"""What happened to one job of a load, on this client's monotonic clock."""

import asyncio
from array import array

from gllm.protocol import Done, Error, Start, Tokens
from gllm.reply import Cursor, Reply, ReplyError, read_entry
from worker.load.work import Work

ENDED_WELL = ("stop", "length")


class Record:
    """`due`: when it was to be sent; all other moments are None until they come. `outcome`: how it ended."""

    def __init__(self, job_id: str, work: Work, due: float) -> None:
        self.id = job_id
        self.work = work
        self.due = due
        self.sent: float | None = None
        self.accepted: float | None = None
        self.started: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.ended: float | None = None
        self.outcome: str | None = None
        self.message = ""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.tokens = 0
        self.preemptions = 0
        self.resumed = 0
        self.heard = due
        self.gaps = array("d")  # seconds between two events with tokens, divided by the tokens of the second
        self.counts = array("L")  # the tokens of that second one
        self.arrivals = array("d")  # when tokens came, and how many: what a plot shows
        self.done = asyncio.Event()
        self.cursor = Cursor()

    @property
    def well(self) -> bool:
        return self.outcome in ENDED_WELL

    def take(self, entry: bytes, fields: dict[bytes, bytes], now: float) -> None:
        """An entry of the reply, read at `now`. What no client could read ends the record as an error."""
        try:
            name, event = read_entry(entry, fields)
            reply = self.cursor.take(name, event)
        except ReplyError as error:
            self.end(type(error).__name__, now, str(error))
            return
        if reply is not None:
            self.heard = now
            self._learn(reply, now)

    def end(self, outcome: str, now: float, message: str = "") -> None:
        """The first end counts."""
        if self.outcome is None:
            self.outcome, self.message, self.ended = outcome, message, now
            self.done.set()

    def _learn(self, reply: Reply, now: float) -> None:
        match reply.event:
            case Start():
                self.started = now
                self.prompt_tokens, self.cached_tokens = reply.event.prompt_tokens, reply.event.cached_tokens
            case Tokens():
                self._tokens(len(reply.event.ids), now)
            case Done():
                self.preemptions = reply.event.usage.preemptions
                self.end(reply.event.finish_reason, now)
            case Error():
                self.end(f"error {reply.event.code}", now, reply.event.message)
            case _:
                self.resumed += 1

    def _tokens(self, count: int, now: float) -> None:
        if self.last is None:
            self.first = now
            self._gap(0.0, count - 1)
        else:
            self._gap((now - self.last) / count, count)
        self.last = now
        self.tokens += count
        self.arrivals.extend((now, count))

    def _gap(self, seconds: float, count: int) -> None:
        if count:
            self.gaps.append(seconds)
            self.counts.append(count)
