"""The reader's side of a reply: what each entry adds to what is known, and how a reply can fail. Pure bookkeeping.

A reply stream may repeat itself: after a repair tokens come again in larger entries, after a failover an older copy of
the stream is written on. A `Cursor` knows the ids it has seen and drops what comes again after comparing it: its reader
gets every token once, in order, or a stated error.
"""

import re
from typing import Any

import msgspec
from msgspec import Struct

from gllm.protocol import TERMINAL_ENTRY_ID, Done, Error, ReplyEvent, Timings, TokenLogprob, Tokens, Usage, decode_event

MAX_TOKENS = 2**31 - 1  # of a reply, as of `max_tokens`; what a stream calls its entries elsewhere is far beyond
_ENTRY_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")


class ReplyError(RuntimeError):
    """A reply that cannot be read to its end."""


class Rewound(ReplyError):
    """The stream went back and its tokens now differ from those already read: start over with a new job."""


class Hole(ReplyError):
    """Tokens between those already read and the next ones are missing from the stream."""


class ReplyExpired(ReplyError):
    """The job has ended and its reply is no longer kept."""


class JobFailed(ReplyError):
    """The job ended with an error event: its `code`, its message, and whether submitting it anew may help."""

    def __init__(self, job_id: str, error: Error) -> None:
        super().__init__(f"job {job_id}: {error.code}: {error.message}")
        self.code = error.code
        self.message = error.message
        self.retryable = error.retryable


class Reply(Struct, frozen=True):
    """One event of a reply. `entry` is the resume token; `n` tokens and `characters` (code points) are read with it."""

    entry: str
    event: ReplyEvent
    n: int
    characters: int | None

    @property
    def text(self) -> str:
        """The text that this event adds."""
        return self.event.text if isinstance(self.event, Tokens | Done) else ""

    @property
    def ids(self) -> list[int]:
        """The token ids that this event adds."""
        return self.event.ids if isinstance(self.event, Tokens) else []


class Result(Struct, frozen=True, kw_only=True):
    """A whole reply. `logprobs` has an entry per id when the job asked for them."""

    id: str
    text: str
    ids: list[int]
    finish_reason: str
    stop: str | int | None
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Cursor:
    """A reader's place in one reply.

    It starts behind `last_id`, the entry its reader has seen last, and is fed the stream from its beginning: what lies
    before its place is learned, not shown. `characters` is the count that came with `last_id`; it is only needed when
    the stream was rewritten in the meantime.
    """

    def __init__(self, last_id: str = "0-0", characters: int | None = None) -> None:
        self._seen = _entry_id(last_id)
        self.ended = last_id == TERMINAL_ENTRY_ID
        self.n = 0 if self.ended else self._seen[0]  # how many tokens were read
        if self.n > MAX_TOKENS:
            raise ValueError(
                f"last_id: an entry id of a reply like 12-0 expected, got {last_id!r}: no reply is so long"
            )
        self._ids: dict[int, int] = {}  # by position, as far as they are known: `last_id` may name any number of tokens
        self._characters = 0 if self._seen[0] == 0 else characters

    def take(self, entry: str, event: ReplyEvent) -> Reply | None:
        """What the entry adds for the reader; None when it adds nothing. Raises Rewound or Hole."""
        if isinstance(event, Tokens):
            return self._tokens(entry, event)
        if _entry_id(entry) <= self._seen:
            return None
        if isinstance(event, Done | Error):
            self._end(event)
        return self._shown(entry, event)

    def _tokens(self, entry: str, event: Tokens) -> Reply | None:
        if event.first > self.n:
            raise Hole(f"entry {entry}: tokens {self.n} to {event.first} of the reply are missing")
        known = min(self.n - event.first, len(event.ids))
        self._compare(entry, event, known)
        if known == len(event.ids):
            self._learn_characters(event, known)
            return None
        rest = self._without(entry, event, known)
        self._ids.update(enumerate(rest.ids, start=self.n))
        self.n += len(rest.ids)
        self._characters = rest.at + len(rest.text)
        return self._shown(entry, rest)

    def _compare(self, entry: str, event: Tokens, known: int) -> None:
        for position, token in enumerate(event.ids[:known], start=event.first):
            if (known_as := self._ids.setdefault(position, token)) != token:
                raise Rewound(f"entry {entry}: token {position} was {known_as} and is now {token}")

    def _learn_characters(self, event: Tokens, known: int) -> None:
        if self._characters is None and event.first + known == self.n:
            self._characters = event.at + len(event.text)

    def _without(self, entry: str, event: Tokens, known: int) -> Tokens:
        """The event without its first `known` tokens and the characters that were read with them."""
        if self._characters is None and known:
            raise Rewound(f"entry {entry}: tokens {event.first} to {self.n} came again in another entry")
        read = event.at if self._characters is None else self._characters
        if not event.at <= read <= event.at + len(event.text):
            raise Hole(f"entry {entry}: its text starts at character {event.at}, the text read ends at {read}")
        if read == event.at and not known:
            return event
        return msgspec.structs.replace(
            event,
            first=self.n,
            at=read,
            ids=event.ids[known:],
            text=event.text[read - event.at :],
            logprobs=event.logprobs[known:] if event.logprobs is not None else None,
            prompt_logprobs=None if known else event.prompt_logprobs,
        )

    def _end(self, event: Done | Error) -> None:
        count = event.usage.completion_tokens if isinstance(event, Done) else self.n
        if count > self.n:
            raise Hole(f"the reply ended after {count} tokens, {self.n} of them in the stream")
        if count < self.n:
            raise Rewound(f"the reply ended after {count} tokens, {self.n} of it were read before")
        self.ended = True

    def _shown(self, entry: str, event: ReplyEvent) -> Reply:
        self._seen = max(self._seen, _entry_id(entry))
        if isinstance(event, Done) and self._characters is not None:
            self._characters += len(event.text)
        return Reply(entry, event, self.n, self._characters)


class Assembly:
    """Puts the events of one reply together to a `Result`."""

    def __init__(self, job_id: str) -> None:
        self._id = job_id
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._done: Done | None = None

    def add(self, reply: Reply) -> None:
        """Takes the next event. Raises JobFailed for an error event."""
        event = reply.event
        if isinstance(event, Error):
            raise JobFailed(self._id, event)
        self._text.append(reply.text)
        if isinstance(event, Tokens):
            self._add_tokens(event)
        elif isinstance(event, Done):
            self._done = event

    def _add_tokens(self, event: Tokens) -> None:
        self._ids += event.ids
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        if event.logprobs is not None:
            self._logprobs = (self._logprobs or []) + event.logprobs

    def result(self) -> Result:
        """The whole reply. To be asked for after its terminal event."""
        done = self._done
        assert done is not None, "the reply has not ended"
        return Result(
            id=self._id,
            text="".join(self._text),
            ids=self._ids,
            finish_reason=done.finish_reason,
            stop=done.stop,
            usage=done.usage,
            timings=done.timings,
            logprobs=self._logprobs,
            prompt_logprobs=done.prompt_logprobs or self._prompt_logprobs,
        )


def read_entry(entry: bytes, fields: dict[bytes, Any]) -> tuple[str, ReplyEvent]:
    """The id and the event of a raw stream entry. Raises ReplyError for what is no event of this protocol version."""
    name = entry.decode()
    try:
        return name, decode_event(fields[b"d"])
    except (KeyError, msgspec.DecodeError) as error:
        raise ReplyError(f"entry {name}: no reply event of protocol version 1: {error}") from None


def _entry_id(text: str) -> tuple[int, int]:
    match = _ENTRY_ID.fullmatch(text)
    if match is None:
        raise ValueError(f"last_id: an entry id like 12-0 expected, got {text!r}")
    return int(match[1]), int(match[2])
