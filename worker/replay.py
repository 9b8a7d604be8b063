"""What a reply stream already holds: the tokens that a worker goes on from when it takes a job over."""

from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

from gllm.protocol import Resume, Start, TokenLogprob, Tokens, decode_event

PAGE = 500  # entries a read: a long reply is some hundred, and one read must not hold up the server


class Replay(Struct, kw_only=True):
    """The published part of a reply. `numerics` are those of every attempt so far; `start` is the first attempt's."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    numerics: set[str] = field(default_factory=set)
    start: Start | None = None

    def add(self, data: bytes) -> None:
        """Take the next event in. What comes after a hole is ignored: it will be generated again."""
        try:
            event = decode_event(data)
        except msgspec.MsgspecError:
            return
        if isinstance(event, Start | Resume):
            self.numerics.add(event.numerics)
        if isinstance(event, Start):
            self.start = self.start or event
        elif isinstance(event, Tokens):
            self._add_tokens(event)

    def _add_tokens(self, event: Tokens) -> None:
        if event.first > len(self.ids):
            return
        self.ids[event.first :] = event.ids  # after a repair an event may repeat what is known
        self.logprobs[event.first :] = event.logprobs or []
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs


def replay(events: Iterable[bytes]) -> Replay:
    """The published part of a reply from its events in order."""
    published = Replay()
    for data in events:
        published.add(data)
    return published
