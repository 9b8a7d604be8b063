"""Random lives of many requests in small pools: each gets exactly what it gets alone, in bounded steps. No torch."""

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from engine.request import FinishReason
from tests.engine.scripted import Bench, expected

LIFE = 120  # operations of one life


class Life:
    """One bench and whatever can happen to it."""

    def __init__(self, seed: int, blocks: int) -> None:
        self.generator = random.Random(seed * 100 + blocks)
        pick = self.generator.choice
        self.bench = Bench(
            blocks=blocks, block_size=pick((1, 2, 4)), rows=pick((1, 2, 5)), budget=pick((1, 2, 3, 7, 64)),
            cache=pick((True, True, False)), depth=pick((1, 2)),
        )  # fmt: skip
        self._roots = [[self.generator.randrange(3, 60) for _ in range(40)] for _ in range(2)]
        self.failed: set[str] = set()
        self.counted: list[tuple[int, ...]] = []

    def run(self) -> None:
        acts: dict[Callable[[], None], int] = {
            self.add: 25, self.bench.step: 60, self.bench.launch_ahead: 8, self.cancel: 6, self.hold: 6,
            self.unhold: 8, self.bench.clear: 2, self.fail: 1,
        }  # fmt: skip
        for _ in range(LIFE):
            self.generator.choices(list(acts), list(acts.values()))[0]()
            self._count()
        for sequence in self.bench.sequences.values():
            sequence.held = False
        self.bench.run(most=4000)
        self._count()
        self.judge()

    def add(self) -> None:
        generator, bench = self.generator, self.bench
        name, most = f"r{len(bench.told)}", bench.info.capacity_tokens
        tokens = generator.choice(self._roots)[: generator.randint(1, max(1, min(40, most)))]
        tokens[-1] = generator.choice((tokens[-1], 50))
        more: dict[str, object] = {"ignore_eos": generator.random() < 0.5, "isolate": generator.random() < 0.1}
        if generator.random() < 0.2:
            more["output"] = [generator.randrange(3, 60) for _ in range(generator.randint(1, 4))]
        elif generator.random() < 0.2:
            more["prompt_logprobs"] = 0
        with suppress(ValueError):  # too large, or nothing left to sample
            bench.add(name, tokens, generator.choice((1, 2, 5, 12, None)), tenant=generator.choice("ab"), **more)

    def _some(self) -> str | None:
        alive = [name for name, told in self.bench.told.items() if not told.ends]
        return self.generator.choice(alive) if alive else None

    def cancel(self) -> None:
        if name := self._some():
            self.bench.cancel(name)

    def hold(self) -> None:
        if name := self._some():
            self.bench.sequences[name].held = True

    def unhold(self) -> None:
        for sequence in self.bench.sequences.values():
            sequence.held = False

    def fail(self) -> None:
        self.failed |= {entry.sequence.id for plan, _ in self.bench.launched for entry in plan.entries}
        self.bench.fail()

    def _count(self) -> None:
        """Counters only ever grow (MX-H1)."""
        counters = self.bench.scheduler.counters
        now = tuple(getattr(counters, name) for name in counters.__struct_fields__)
        assert not self.counted or all(new >= old for new, old in zip(now, self.counted[-1], strict=True))
        self.counted.append(now)

    def judge(self) -> None:
        bench, counters = self.bench, self.bench.scheduler.counters
        whole = True
        for name, told in bench.told.items():
            sequence = bench.sequences[name]
            alone = expected(sequence.request, sequence.limit - sequence.prompt_length)
            if told.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert told.tokens == alone
                assert sequence.wants_prompt_logprobs == bool(told.prompt_logprobs)
            else:
                assert told.reason is FinishReason.CANCELLED or name in self.failed
                assert told.tokens == alone[: len(told.tokens)]
                whole &= bool(told.tokens) or sequence.admissions == 0
            for rows in told.prompt_logprobs:
                assert [row and row[0] for row in rows] == [None, *sequence.request.tokens[1:]]
        assert counters.generation_tokens == sum(len(told.tokens) for told in bench.told.values())
        assert counters.prefix_hit_tokens == sum(
            max(told.cached) for name, told in bench.told.items() if not bench.sequences[name].request.output
        )
        prefilled = counters.prefix_hit_tokens + counters.prompt_tokens
        assert prefilled == counters.prefix_prompt_tokens if whole else prefilled <= counters.prefix_prompt_tokens


@pytest.mark.parametrize("blocks", [1, 4, 8, 30])
@pytest.mark.parametrize("batch", range(5))
def test_random_lives_get_what_they_get_alone(blocks, batch):
    preemptions = 0
    for seed in range(30 * batch, 30 * batch + 30):
        life = Life(seed, blocks)
        life.run()
        preemptions += life.bench.scheduler.counters.preemptions
    assert preemptions or blocks in (1, 30)
