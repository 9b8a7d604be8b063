"""What the jobs of a load are: how long, and which tokens their prompts are made of."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from random import Random
from typing import Protocol

from msgspec import Struct

from worker.load.arrivals import Process
from worker.load.traces import BLOCK, Request

Segment = tuple[str, int]


class Work(Struct, frozen=True):
    """One job to be. `at`: seconds after the start, None where a client submits it when it is free.

    A prompt is segments one after the other, (name, tokens): equal names are equal tokens.
    """

    index: int
    at: float | None
    segments: tuple[Segment, ...]
    max_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, count in self.segments)


class Span(Struct, frozen=True):
    """Lengths from `low` to `high`, both included, each as likely."""

    low: int
    high: int

    def draw(self, generator: Random) -> int:
        return generator.randint(self.low, self.high)


class Prefix(Struct, frozen=True):
    """The first `tokens` of each prompt are those of one of `groups` groups, drawn job by job."""

    tokens: int = 0
    groups: int = 1


class Shape(Protocol):
    """What a job is made of, given its number and, from a trace, when it comes."""

    def work(self) -> Iterator[Work]: ...

    @property
    def longest(self) -> int:
        """The most tokens that a job has with its reply."""
        ...


class Drawn(Struct, frozen=True):
    """Endless jobs with lengths of two spans."""

    prompt: Span
    output: Span
    prefix: Prefix
    seed: int

    @property
    def longest(self) -> int:
        return self.prompt.high + self.output.high

    def work(self) -> Iterator[Work]:
        generator = Random(f"lengths {self.seed}")
        for index in itertools.count():
            prompt, output = self.prompt.draw(generator), self.output.draw(generator)
            shared = self.prefix.tokens
            own = (f"job {index}", prompt - shared)
            if shared:
                own_group = (f"group {generator.randrange(self.prefix.groups)}", shared)
                yield Work(index, None, (own_group, own), output)
            else:
                yield Work(index, None, (own,), output)


class Traced(Struct, frozen=True):
    """The requests of a trace, once. `scale` shortens all lengths, `speed` the time between them."""

    requests: Sequence[Request]
    scale: float = 1.0
    speed: float = 1.0

    @property
    def longest(self) -> int:
        return max(self._length(one.prompt_tokens) + self._length(one.output_tokens) for one in self.requests)

    def work(self) -> Iterator[Work]:
        for index, request in enumerate(self.requests):
            segments = tuple(self._segments(index, request))
            yield Work(index, request.at / self.speed, segments, self._length(request.output_tokens))

    def _segments(self, index: int, request: Request) -> Iterator[Segment]:
        left, width = self._length(request.prompt_tokens), self._length(BLOCK)
        for block in request.blocks:
            yield f"block {block}", min(left, width)
            left -= min(left, width)
            if not left:
                return
        yield f"job {index}", left

    def _length(self, tokens: int) -> int:
        return max(1, round(tokens * self.scale))


class Vocabulary(Struct, frozen=True):
    """Token ids from `first` up to, not including, `end`."""

    first: int
    end: int

    def ids(self, work: Work, seed: int) -> list[int]:
        """The prompt: a function of seed and segments, the same on every machine."""
        return [token for name, count in work.segments for token in self._segment(f"{seed} {name}", count)]

    def _segment(self, name: str, count: int) -> list[int]:
        words = memoryview(hashlib.shake_128(name.encode()).digest(4 * count)).cast("I")
        size = self.end - self.first
        return [self.first + word % size for word in words]


def timed(work: Iterator[Work], process: Process, rate: float, seed: int) -> Iterator[Work]:
    """The same jobs, at the moments of an arrival process."""
    moments = process(rate, Random(f"arrivals {seed}"))
    for one, at in zip(work, moments, strict=False):
        yield Work(one.index, at, one.segments, one.max_tokens)
