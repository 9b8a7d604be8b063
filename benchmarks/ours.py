"""Our side of a comparison: the engine, stepped in this process."""

import random
import time
from pathlib import Path
from typing import Literal

from msgspec import Struct

from engine import Engine, EngineConfig, Request, SamplingParams

Prompt = list[int]
BLOCK_SIZE = 16


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Speed does not depend on what a prompt says, only on how long it is."""
    rng = random.Random(seed)
    first = vocab_size // 2  # far from control tokens, which come first
    return [[rng.randrange(first, vocab_size) for _ in range(length)] for _ in range(count)]


class Run(Struct, frozen=True):
    """One run of one or more prompts. Times are seconds; `tokens` are those of each reply."""

    first_tokens: float  # until the last of the replies had its first token
    total: float
    tokens: list[list[int]]

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first ones, of all replies together; they must have had these in one step."""
        return sum(len(reply) - 1 for reply in self.tokens) / (self.total - self.first_tokens)


class Ours:
    """gllm's engine with its default settings, but for the size of the pool, the cache and what else is named."""

    def __init__(
        self, model: Path, *, prefix_cache: bool, kv_blocks: int, threads: int,
        deterministic: Literal["auto"] | bool = "auto",
    ) -> None:  # fmt: skip
        config = EngineConfig(
            model=str(model), device="cpu", dtype="bfloat16", block_size=BLOCK_SIZE, kv_blocks=kv_blocks,
            max_sequences=16, prefix_cache=prefix_cache, threads=threads, deterministic=deterministic,
        )  # fmt: skip
        self.engine = Engine(config)
        self._runs = 0

    def run(self, prompts: list[Prompt], new_tokens: int) -> Run:
        """All prompts at once, greedily, `new_tokens` each."""
        self._runs += 1
        ids = [f"{self._runs}-{index}" for index in range(len(prompts))]
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        replies: dict[str, list[int]] = {request_id: [] for request_id in ids}
        start = time.perf_counter()
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.engine.add(Request(id=request_id, tokens=prompt, sampling=sampling))
        first = self._step(replies, start)
        return Run(first, time.perf_counter() - start, list(replies.values()))

    def _step(self, replies: dict[str, list[int]], start: float) -> float:
        """Run to the end; returns when the last reply had its first token."""
        first: float | None = None
        while self.engine.busy:
            for delta in self.engine.step():
                assert delta.error is None, delta.error
                replies[delta.id] += delta.tokens
            if first is None and all(replies.values()):
                first = time.perf_counter() - start
        assert first is not None
        return first

    def clear_cache(self) -> None:
        self.engine.clear_cache()
