"""A day at work: jobs with shared prefixes that arrive while others run, and chats that go on with the reply."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from benchmarks.trace import Job
from engine import Delta, Engine, Request, SamplingParams
from tests.engine.driving import Reply, poison, record_logits, settle

WORDS = range(1000, 49152)  # ordinary tokens of the demo model
QUESTION, ANSWER, SECOND_TURNS = 7, 5, 3  # tokens asked and answered in a second turn, which every third job has


def sampling(number: int, new_tokens: int) -> SamplingParams:
    """Greedy and seeded in turn."""
    if number % 2:
        return SamplingParams(
            max_tokens=new_tokens, temperature=0.9, top_p=0.95, top_k=50, seed=number, ignore_eos=True
        )
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)


@dataclass
class Day:
    """One engine serving jobs that arrive one a step; what it said, and digests of all logits by position."""

    engine: Engine
    jobs: list[Job]
    replies: dict[str, Reply] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def serve(self) -> "Day":
        """Until all have ended; the books are checked after every step."""
        poison(self.engine)
        recorded = record_logits(self.engine)
        coming = list(enumerate(self.jobs))[::-1]
        while coming or self.engine.busy:
            if coming:
                number, job = coming.pop()
                self._add(str(number), list(job.prompt), sampling(number, job.new_tokens))
            self._take(self.engine.step())
            self.engine.check()
            self.logits |= {key: digest(row) for key, row in recorded.items()}
            recorded.clear()
        settle(self.engine)
        return self

    def _add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.prompts[name], self.replies[name] = prompt, Reply()
        self.engine.add(Request(id=name, tokens=prompt, sampling=params))

    def _take(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            reply = self.replies[delta.id]
            reply.take(delta)
            if delta.finish_reason is not None and delta.id.isdigit() and int(delta.id) % SECOND_TURNS == 0:
                self._second_turn(delta.id, reply)

    def _second_turn(self, name: str, reply: Reply) -> None:
        question = random.Random(name).choices(WORDS, k=QUESTION)
        prompt = [*self.prompts[name], *reply.tokens, *question]
        self._add(f"{name} goes on", prompt, sampling(int(name), ANSWER))


def digest(row: torch.Tensor) -> bytes:
    return blake2b(row.contiguous().view(torch.uint8).numpy().data, digest_size=16).digest()


def assert_same(off: Day, on: Day) -> None:
    """Every reply and every bit of every row of logits, with the cache on and off."""
    assert on.prompts == off.prompts, "a second turn differs, so a reply did"
    for name, reply in off.replies.items():
        assert on.replies[name].tokens == reply.tokens, name
        assert on.replies[name].finish_reason == reply.finish_reason
    assert on.logits == off.logits
    assert len(on.logits) == sum(len(reply.tokens) for reply in on.replies.values())


def assert_exact(day: Day) -> None:
    """The engine's totals are the sums over its replies, and each prompt token is counted once."""
    stats, usages = day.engine.stats(), [reply.usage for reply in day.replies.values() if reply.usage]
    assert len(usages) == len(day.prompts)
    assert stats.prefix_hit_tokens == sum(usage.cached_tokens for usage in usages)
    assert stats.prefix_hit_tokens + stats.prompt_tokens == stats.prefix_prompt_tokens
    assert stats.prefix_prompt_tokens == sum(map(len, day.prompts.values())) == sum(u.prompt_tokens for u in usages)
    assert stats.generation_tokens == sum(usage.completion_tokens for usage in usages)
    assert stats.preemptions == sum(usage.preemptions for usage in usages)
