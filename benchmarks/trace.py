"""Requests of a trace with shared prefixes, scaled to a model's context; a made-up trace, too. No torch."""

import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from worker.load.traces import BLOCK, Request, read_trace


class Job(Struct, frozen=True):
    """A request scaled to a context: its prompt, and how many tokens it is to get."""

    prompt: "array[int]"
    new_tokens: int


class Scale(Struct, frozen=True):
    """`width` tokens stand for BLOCK of the trace, so that its longest request fits the context."""

    width: int

    @classmethod
    def fitting(cls, requests: Iterable[Request], context: int, multiple: int = 16) -> "Scale":
        """Raises ValueError if the context is too short for any scale. Blocks stay whole where they can."""
        longest = max(request.prompt_tokens + request.output_tokens for request in requests)
        width = min(BLOCK, context * BLOCK // (longest + 2 * BLOCK))
        if width < 1:
            raise ValueError(f"context: {context} tokens cannot hold a request of {longest} at any scale")
        return cls(width // multiple * multiple or width)

    def length(self, tokens: int) -> int:
        return max(1, tokens * self.width // BLOCK)

    def job(self, request: Request, vocabulary: range) -> Job:
        tokens = array("i")
        for hash_id in request.blocks:
            tokens.extend(block_tokens(hash_id, self.width, vocabulary))
        return Job(tokens[: self.length(request.prompt_tokens)], self.length(request.output_tokens))


def block_tokens(hash_id: int, width: int, vocabulary: range) -> list[int]:
    """Tokens that depend on the id alone; two ids have different ones, but for a chance of len(vocabulary)^-width."""
    digest = hashlib.shake_128(hash_id.to_bytes(8, "little")).digest(4 * width)
    first, count = vocabulary.start, len(vocabulary)
    return [first + word % count for word in memoryview(digest).cast("I")]


def shared_trace(path: Path) -> list[Request]:
    """The requests of a trace that says what prompts share. Raises ValueError naming the file; see `read_trace`."""
    requests = read_trace(path)
    if bare := sum(not request.blocks for request in requests):
        raise ValueError(f"{path}: hash_ids expected, {bare} of {len(requests)} requests have none")
    return requests


def thin(requests: Sequence[Request], count: int, seed: int = 0) -> list[Request]:
    """About `count` requests of a longer trace: whole conversations, picked at random, in their order of arrival.

    What is asked for again is kept with what it repeats, so the hit rate stays about what it was; the first `count`
    requests would find an empty cache instead. A conversation is known by its first two blocks.
    """
    chats: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        chats.setdefault(tuple(request.blocks[:2]), []).append(number)
    order = list(chats.values())
    random.Random(seed).shuffle(order)
    chosen: list[int] = []
    while order and len(chosen) < count:
        chosen += order.pop()
    return [requests[number] for number in sorted(chosen)]


def synthesise(count: int, seed: int = 0) -> list[Request]:
    """A made-up trace of the same structure: chats of several turns, side by side, with a few system prompts in common.

    As in the real one, about half of the requests open a chat, lengths have a long tail, and what a turn adds is new.
    """
    generator = random.Random(seed)
    fresh = iter(range(1, 10**9))
    systems = [[0, *(next(fresh) for _ in range(generator.randint(0, 3)))] for _ in range(4)]
    chats: list[list[int]] = []
    requests: list[Request] = []
    while len(requests) < count:
        going_on = bool(chats) and generator.random() < 0.4
        start = chats.pop(generator.randrange(len(chats))) if going_on else generator.choice(systems)
        length = min(48, 1 + int(generator.lognormvariate(1.4, 0.9)))
        history = [*start, *(next(fresh) for _ in range(length))]
        rest = generator.randint(1, BLOCK)
        output = min(2000, 1 + int(generator.lognormvariate(5.3, 0.8)))
        requests.append(Request(len(requests) / 4, (len(history) - 1) * BLOCK + rest, output, tuple(history)))
        if generator.random() < 0.6:
            # the next turn knows all whole blocks; the last one goes on with the reply
            chats.append(history[:-1])
    return requests


def ideal_hit_rate(requests: Sequence[Request]) -> float:
    """The share of blocks that an unlimited cache would serve if each request ended before the next came."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        known = [hash_id in seen for hash_id in request.blocks]
        hits += known.index(False) if False in known else len(known)
        seen.update(request.blocks)
    return hits / sum(len(request.blocks) for request in requests)
