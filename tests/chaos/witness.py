"""What one client saw of one reply, and whether each event began exactly where the last one had ended."""

import time
from collections.abc import Sequence

from gllm.protocol import Done, Error, Resume, Start, TokenLogprob, Tokens
from gllm.reply import Reply
from tests.chaos.workload import Case


class Witness:
    """Reads along. `faults` has a line for everything that should not have been."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self.starts: list[Start] = []
        self.resumes: list[Resume] = []
        self.terminals: list[Done | Error] = []
        self.heard: list[tuple[float, int]] = []  # when (monotonic) there were how many tokens
        self.end_time = 0.0  # monotonic
        self.place: tuple[str, int | None] = ("0-0", None)  # where the next stream goes on
        self.hangups = 0
        self._begin = time.monotonic()
        self.events: list[str] = []
        self.faults: list[str] = []

    @property
    def ended(self) -> bool:
        return bool(self.terminals)

    def take(self, reply: Reply) -> None:
        event = reply.event
        name, when = type(event).__name__, time.monotonic() - self._begin
        self.events.append(f"{when:8.3f}  {reply.entry} {name} n={reply.n} characters={reply.characters}")
        if self.ended:
            self.faults.append(f"{reply.entry} came after the end")
        match event:
            case Tokens():
                self._tokens(reply.entry, event)
            case Start():
                self.starts.append(event)
            case Resume():
                self._resume(reply.entry, event)
            case Done() | Error():
                self.terminals.append(event)
                self.end_time = time.monotonic()
                self.text += reply.text
        self._check_counts(reply)
        self.place = (reply.entry, reply.characters)

    def _tokens(self, entry: str, event: Tokens) -> None:
        if (event.first, event.at) != (len(self.ids), len(self.text)):
            had = f"{len(self.ids)} tokens and {len(self.text)} characters"
            self.faults.append(f"{entry} goes on from {event.first} and {event.at}, after {had}")
        self.ids += event.ids
        self.text += event.text
        self.logprobs += event.logprobs or []
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.heard.append((time.monotonic(), len(self.ids)))

    def _resume(self, entry: str, event: Resume) -> None:
        self.resumes.append(event)
        if event.first != len(self.ids):
            self.faults.append(f"{entry} resumes from {event.first}, after {len(self.ids)} tokens")
        if not event.exact:
            self.faults.append(f"{entry} resumes, but is not exact")

    def _check_counts(self, reply: Reply) -> None:
        if reply.n != len(self.ids) or reply.characters not in (None, len(self.text)):
            self.faults.append(f"{reply.entry} says n={reply.n} characters={reply.characters}, after {len(self.ids)}")
