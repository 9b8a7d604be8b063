"""Requests with shared prefixes in the Mooncake format, scaled to a model's context. No torch.

A trace (FAST 2025, kvcache-ai/Mooncake) has a JSON object a line: `timestamp` in ms, `input_length` and `output_length`
in tokens, and `hash_ids`, one for each 512 tokens of the prompt and one for the rest. Equal ids mean equal tokens, from
the prompt's start.
"""

import gzip
import hashlib
import json
import random
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

TRACE_BLOCK = 512  # tokens that one hash id stands for


class TraceRequest(Struct, frozen=True):
    """One line of a trace. Lengths are tokens, the timestamp milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class Job(Struct, frozen=True):
    """A request scaled to a context: its prompt, and how many tokens it is to get."""

    prompt: "array[int]"
    new_tokens: int


class Scale(Struct, frozen=True):
    """`width` tokens stand for TRACE_BLOCK of the trace, so that its longest request fits the context."""

    width: int

    @classmethod
    def fitting(cls, requests: Iterable[TraceRequest], context: int, multiple: int = 16) -> "Scale":
        """Raises ValueError if the context is too short for any scale. Blocks stay whole where they can."""
        longest = max(request.input_length + request.output_length for request in requests)
        width = min(TRACE_BLOCK, context * TRACE_BLOCK // (longest + 2 * TRACE_BLOCK))
        if width < 1:
            raise ValueError(f"context: {context} tokens cannot hold a request of {longest} at any scale")
        return cls(width // multiple * multiple or width)

    def length(self, tokens: int) -> int:
        return max(1, tokens * self.width // TRACE_BLOCK)

    def job(self, request: TraceRequest, vocabulary: range) -> Job:
        tokens = array("i")
        for hash_id in request.hash_ids:
            tokens.extend(block_tokens(hash_id, self.width, vocabulary))
        return Job(tokens[: self.length(request.input_length)], self.length(request.output_length))


def block_tokens(hash_id: int, width: int, vocabulary: range) -> list[int]:
    """Tokens that depend on the id alone; two ids have different ones, but for a chance of len(vocabulary)^-width."""
    digest = hashlib.shake_128(hash_id.to_bytes(8, "little")).digest(4 * width)
    first, count = vocabulary.start, len(vocabulary)
    return [first + word % count for word in memoryview(digest).cast("I")]


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests in order of arrival. Raises ValueError naming file and line."""
    requests: list[TraceRequest] = []
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            request = msgspec.convert(json.loads(line), TraceRequest)
        except (ValueError, msgspec.ValidationError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if len(request.hash_ids) != -(-request.input_length // TRACE_BLOCK) or not request.hash_ids:
            raise ValueError(f"{path}, line {number}: {len(request.hash_ids)} ids for {request.input_length} tokens")
        requests.append(request)
    return sorted(requests, key=lambda request: request.timestamp)


def thin(requests: Sequence[TraceRequest], count: int, seed: int = 0) -> list[TraceRequest]:
    """About `count` requests of a longer trace: whole conversations, picked at random, in their order of arrival.

    What is asked for again is kept with what it repeats, so the hit rate stays about what it was; the first `count`
    requests would find an empty cache instead. A conversation is known by its first two blocks.
    """
    chats: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        chats.setdefault(tuple(request.hash_ids[:2]), []).append(number)
    order = list(chats.values())
    random.Random(seed).shuffle(order)
    chosen: list[int] = []
    while order and len(chosen) < count:
        chosen += order.pop()
    return [requests[number] for number in sorted(chosen)]


def synthesise(count: int, seed: int = 0) -> list[TraceRequest]:
    """A made-up trace of the same structure: chats of several turns, side by side, with a few system prompts in common.

    As in the real one, about half of the requests open a chat, lengths have a long tail, and what a turn adds is new.
    """
    generator = random.Random(seed)
    fresh = iter(range(1, 10**9))
    systems = [[0, *(next(fresh) for _ in range(generator.randint(0, 3)))] for _ in range(4)]
    chats: list[list[int]] = []
    requests: list[TraceRequest] = []
    while len(requests) < count:
        going_on = bool(chats) and generator.random() < 0.4
        start = chats.pop(generator.randrange(len(chats))) if going_on else generator.choice(systems)
        length = min(48, 1 + int(generator.lognormvariate(1.4, 0.9)))
        history = [*start, *(next(fresh) for _ in range(length))]
        rest = generator.randint(1, TRACE_BLOCK)
        output = min(2000, 1 + int(generator.lognormvariate(5.3, 0.8)))
        requests.append(TraceRequest(len(requests) * 250.0, (len(history) - 1) * TRACE_BLOCK + rest, output, history))
        if generator.random() < 0.6:
            # the next turn knows all whole blocks; the last one goes on with the reply
            chats.append(history[:-1])
    return requests


def ideal_hit_rate(requests: Sequence[TraceRequest]) -> float:
    """The share of blocks that an unlimited cache would serve if each request ended before the next came."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        known = [hash_id in seen for hash_id in request.hash_ids]
        hits += known.index(False) if False in known else len(known)
        seen.update(request.hash_ids)
    return hits / sum(len(request.hash_ids) for request in requests)
