"""A worker played by hand: reply streams written entry by entry, as in the protocol."""

import redis as redis_sync

from gllm.keys import Keys
from gllm.protocol import (
    TERMINAL_ENTRY_ID,
    Done,
    Error,
    ReplyEvent,
    Resume,
    Start,
    Timings,
    Tokens,
    Usage,
    encode_event,
)

LIFE_SECONDS = 600


class Scribe:
    """Writes the reply of one job as a worker would."""

    def __init__(self, raw: redis_sync.Redis, keys: Keys, job_id: str) -> None:
        self.raw, self.keys, self.id = raw, keys, job_id
        self.out = keys.out(job_id)

    def add(self, entry: str, event: ReplyEvent) -> None:
        self.raw.xadd(self.out, {"d": encode_event(event)}, id=entry)
        self.raw.expire(self.out, LIFE_SECONDS)

    def state(self, state: str) -> None:
        self.raw.hset(self.keys.job(self.id), "state", state)
        self.raw.expire(self.keys.job(self.id), LIFE_SECONDS)

    def restore(self, older: bytes) -> None:
        """Puts an older copy of the reply back, as a failover may."""
        self.raw.restore(self.out, 1000 * LIFE_SECONDS, older, replace=True)

    def start(self, epoch: int = 1, cached: int = 0) -> None:
        self.state("running")
        event = Start(worker="w1", attempt=1, numerics="x", prompt_tokens=5, cached_tokens=cached)
        self.add(f"0-{epoch}", event)

    def resume(self, n: int, epoch: int, *, exact: bool = True) -> None:
        self.add(f"{n}-{epoch}", Resume(worker="w2", attempt=2, numerics="x", first=n, exact=exact))

    def tokens(self, first: int, at: int, ids: list[int], text: str, **more) -> None:
        self.add(f"{first + len(ids)}-0", Tokens(first=first, at=at, ids=ids, text=text, **more))

    def done(self, n: int, text: str = "", reason: str = "stop") -> None:
        usage = Usage(prompt_tokens=5, completion_tokens=n)
        self.add(TERMINAL_ENTRY_ID, Done(finish_reason=reason, stop=None, text=text, usage=usage, timings=Timings()))
        self.state("ended")  # a worker does both at once; the other way round the reply would look lost for a moment

    def error(self, code: str = "invalid", message: str = "top_p: no") -> None:
        self.add(TERMINAL_ENTRY_ID, Error(code=code, message=message))
        self.state("ended")

    def hello(self) -> None:
        """A whole reply of three tokens, in two entries and a tail."""
        self.start()
        self.tokens(0, 0, [1], "Hel")
        self.tokens(1, 3, [2, 3], "lo wor")
        self.done(3, "ld")
