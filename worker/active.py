"""One job on this worker, from its claim to its terminal event: what it has, what Redis has, what is to be written."""

import math
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.request import TokenLogprob as EngineLogprob
from gllm.protocol import Done, Error, Resume, Start, TokenLogprob, Tokens, Usage, encode_event
from worker import logs
from worker.metrics import JobClock, Metrics
from worker.queue import Claimed
from worker.replay import Replay
from worker.rows import Answer, AppendRow, FinishRow
from worker.text import Ending, ReplyText

NO_PROBABILITY = -9999.0  # what JSON has for minus infinity


class ActiveJob:
    """A claimed job. `published` is what Redis has (n); `reply` has the tokens, from the first one on.

    Where the reply stream was lost, `published` is ahead of `reply` until the tokens have been generated again.
    """

    def __init__(self, claimed: Claimed, metrics: Metrics) -> None:
        self.claimed = claimed
        self.log = logs.of_job(claimed.id, claimed.epoch, claimed.claims)
        self.clock = JobClock(
            metrics,
            (claimed.claimed_ms - claimed.submitted_ms) / 1000,
            claimed.claimed,
            claims=claimed.claims,
            published=claimed.published,
        )
        self.published = claimed.published
        self.reply: ReplyText | None = None
        self.prompt_tokens = 0
        self.cached_tokens = claimed.cached_tokens
        self.preemptions = 0
        self.in_engine = False
        self.started = False  # the engine has admitted it
        self.chat: bool | None = None  # its prompt was given as messages; None until its body was read
        self.terminal: Done | Error | None = None
        self.on_trial = claimed.suspect
        self.holds: set[str] = set()  # why the engine must not step it now
        self.releasing = False  # it is being handed back: a renewal that finds it gone says nothing new
        self.abandoned = False  # its reply cannot be written
        self._mark: Start | Resume | None = None
        self._replay = Replay()
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def id(self) -> str:
        return self.claimed.id

    @property
    def n(self) -> int:
        """Tokens of the reply that this worker has."""
        return len(self.reply.ids) if self.reply else 0

    @property
    def unpublished(self) -> int:
        return max(0, self.n - self.published)

    @property
    def urgent(self) -> bool:
        """Whether the client waits for the job's first token, or for its end."""
        return self.terminal is not None or (self.published == 0 and self.n > 0)

    @property
    def outcome(self) -> str:
        """For metrics and logs: the finish reason or the error's code."""
        if isinstance(self.terminal, Error):
            return self.terminal.code
        return self.terminal.finish_reason if self.terminal else ""

    @property
    def finish_reason(self) -> str | None:
        return self.terminal.finish_reason if isinstance(self.terminal, Done) else None

    def prepared(self, reply: ReplyText, prompt_tokens: int, replay: Replay) -> None:
        """Intake is done; `replay` has been pushed through `reply` already."""
        self.reply, self.prompt_tokens, self._replay = reply, prompt_tokens, replay
        self._logprobs = list(replay.logprobs)
        self._prompt_logprobs = replay.prompt_logprobs
        if self.cached_tokens is None and replay.start:
            self.cached_tokens = replay.start.cached_tokens

    def admitted(self, worker: str, numerics: str, deterministic: bool, cached_tokens: int) -> None:
        """The engine has begun: a `start` is to be written, or a `resume` when the reply has one already."""
        self.started = True
        attempt = self.claimed.claims
        if self.cached_tokens is not None:
            exact = deterministic and self._known_numerics() <= {numerics}
            self._mark = Resume(worker=worker, attempt=attempt, numerics=numerics, first=self.published, exact=exact)
            return
        self.cached_tokens = cached_tokens
        self._mark = Start(
            worker=worker,
            attempt=attempt,
            numerics=numerics,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=cached_tokens,
        )

    def _known_numerics(self) -> set[str]:
        """Those that made the published tokens; an unknown one when the reply does not tell."""
        return self._replay.numerics or ({"unknown"} if self.published else set())

    def push(self, ids: list[int], logprobs: Sequence[EngineLogprob] | None) -> Ending | None:
        """Take new tokens in, up to the one that ends the reply."""
        assert self.reply is not None
        before = self.n
        ending = self.reply.push(ids)
        added = self.n - before
        if logprobs:
            self._logprobs += [logprob_of(item) for item in logprobs[:added]]
        self.clock.tokens(added, time.monotonic())
        return ending

    def set_prompt_logprobs(self, logprobs: Sequence[EngineLogprob | None]) -> None:
        self._prompt_logprobs = [None if item is None else logprob_of(item) for item in logprobs]

    def done(self, reason: Literal["stop", "length", "cancelled", "deadline"], stop: str | int | None = None) -> None:
        """Set the terminal event; nothing is pushed after it."""
        if self.terminal is None:
            now = self.clock.over = time.monotonic()
            self.terminal = Done(
                finish_reason=reason,
                stop=stop,
                text=self.reply.tail() if self.reply else "",
                usage=self._usage(),
                timings=self.clock.timings(now),
                prompt_logprobs=None if self.n else self._prompt_logprobs,
            )

    def failed(
        self,
        code: Literal["invalid", "unsupported", "too_large", "max_attempts", "internal"],
        message: str,
        *,
        retryable: bool = False,
    ) -> None:
        if self.terminal is None:
            self.clock.over = time.monotonic()
            self.terminal = Error(code=code, message=message, retryable=retryable)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=max(self.n, self.published),
            preemptions=self.preemptions,
        )

    @property
    def lacking(self) -> bool:
        """Whether there is something that Redis does not have."""
        return self.terminal is not None or (not self.abandoned and (self._mark is not None or self.unpublished > 0))

    def give_up(self) -> None:
        """Write nothing more but a terminal event, a new one: tokens that the old one counts will never be there."""
        self.abandoned, self.terminal = True, None

    def rows(self) -> list[AppendRow]:
        """What Redis lacks: the mark, then all tokens that it does not have."""
        if self.abandoned:
            return []
        return [row for row in (self._mark_row(), self._tokens_row()) if row is not None]

    def _mark_row(self) -> AppendRow | None:
        if self._mark is None:
            return None
        n, mark, cached = self.published, self._mark, ""
        if isinstance(mark, Resume):
            mark = msgspec.structs.replace(mark, first=n)  # a repair may have moved it
        else:
            cached = mark.cached_tokens
        return AppendRow("mark", self.id, self.claimed.epoch, n, n, encode_event(mark), cached)

    def _tokens_row(self) -> AppendRow | None:
        if self.reply is None or self.n <= self.published:
            return None
        first, last = self.published, self.n
        event = Tokens(
            first=first,
            at=self.reply.at(first),
            ids=self.reply.ids[first:last],
            text=self.reply.between(first, last),
            logprobs=self._logprobs[first:last] or None,
            prompt_logprobs=self._prompt_logprobs if first == 0 else None,
        )
        return AppendRow("tokens", self.id, self.claimed.epoch, first, last, encode_event(event))

    def written(self, row: AppendRow) -> None:
        if row.kind == "mark":
            self._mark = None
        else:
            self.published = row.to

    def repair(self, answer: Answer) -> bool:
        """Redis has another number of tokens: go on from there. False when we do not have that many: not ours."""
        if answer.n > self.n:
            return False
        self.published = answer.n
        return True

    def finish_row(self) -> FinishRow | None:
        """The terminal event, once everything before it is written."""
        waits = self._mark is not None or self.n > self.published
        if self.terminal is None or (waits and not self.abandoned):
            return None
        claimed = self.claimed
        return FinishRow(
            self.id, claimed.epoch, self.published, claimed.stream, claimed.entry, encode_event(self.terminal)
        )


def logprob_of(item: EngineLogprob) -> TokenLogprob:
    """As the wire has it: minus infinity has no JSON."""
    token, value, top = item
    return TokenLogprob(token, finite(value), [(other, finite(number)) for other, number in top])


def finite(value: float) -> float:
    return value if math.isfinite(value) else NO_PROBABILITY
