"""A step before it is computed, and what it brought. No torch."""

from msgspec import Struct, field

from engine.request import TokenLogprob
from engine.sequence import Sequence


class Entry(Struct, frozen=True):
    """A sequence's part of a step: positions `start` … `start + count` - 1, from its row on the device.

    `samples`: the last of them yields a token. `fed`: its one input token was sampled in this row and is on the device.
    """

    sequence: Sequence
    admission: int
    row: int
    start: int
    count: int
    samples: bool
    fed: bool


class Plan(Struct):
    """One step: its entries, and what changed in the device's rows since the plan before (differences only)."""

    entries: list[Entry] = field(default_factory=list[Entry])
    opened: list[Sequence] = field(default_factory=list[Sequence])  # rows to set up
    # (row, index, block): table entries to write
    blocks: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    @property
    def tokens(self) -> int:
        return sum(entry.count for entry in self.entries)


class Sampled(Struct):
    """What a step brought, entry by entry of its plan; None where an entry does not sample."""

    tokens: list[int | None]
    broken: list[bool]  # the logits were not finite
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[list[TokenLogprob] | None]
