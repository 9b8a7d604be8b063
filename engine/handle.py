"""A step on its way: what was launched, and its few numbers once they are on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.plan import Plan, Sampled
from engine.sampler import Drawn
from engine.scoring import PromptScores
from kernels import Arrival


@dataclass(frozen=True, slots=True)
class Draws:
    """Tokens on their way: that of each of these entries lies in a place of `drawn`."""

    drawn: Drawn
    entries: Sequence[int]
    places: Sequence[int]

    def put(self, sampled: Sampled) -> None:
        """To where the entries' results belong; on the host."""
        ids, broken, logprobs = self.drawn.ids.tolist(), self.drawn.broken.tolist(), self.drawn.logprobs
        for place, index in zip(self.places, self.entries, strict=True):
            sampled.tokens[index], sampled.logprobs[index] = ids[place], logprobs[place]
            sampled.broken[index] |= broken[place] > 0


@dataclass(slots=True)
class Handle:
    """A launched step, to be collected. Results are keyed by the plan's entries."""

    plan: Plan
    draws: list[Draws]  # of all entries that sample
    broken: Tensor  # by entry: whether one of its checked hidden states is not finite
    arrival: Arrival  # of all that is here on the host
    prompts: dict[int, PromptScores] = field(default_factory=dict[int, PromptScores])  # by entry
    number: int = 0  # of the step, where its results lie in a ring

    def read(self) -> Sampled:
        """Wait for the device, and gather what the step brought, in the order of the plan's entries."""
        self.arrival.wait()
        count = len(self.plan.entries)
        sampled = Sampled([None] * count, [flag > 0 for flag in self.broken.tolist()], [None] * count, [None] * count)
        for draws in self.draws:
            draws.put(sampled)
        for index, scores in self.prompts.items():
            sampled.prompt_logprobs[index] = scores.rows()
            sampled.broken[index] |= not scores.finite
        return sampled
