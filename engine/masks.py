"""Token masks: which tokens a sequence may choose from next. No torch.

The seam for constrained output. Nothing sets a source yet: jobs cannot ask for one.
"""

from array import array
from collections.abc import Iterable
from typing import Protocol


class MaskSource(Protocol):
    """Says what a sequence's next token may be. Held by the sequence, so it lives through preemptions.

    A sequence with a source is not stepped while a token of it is in flight: the mask depends on that token. What a
    source computes between `advance` and `mask`, in a thread of its own, costs no step anything; only waiting does.
    """

    def advance(self, token: int) -> None:
        """The sequence's next token is known: begin to compute the mask of the one after it. Must not wait."""
        ...

    def mask(self) -> "array[int] | None":
        """Packed bits of the next token's mask, as `pack` makes them; None allows all. Waits if it is not ready."""
        ...


def pack(allowed: Iterable[int], vocab_size: int) -> "array[int]":
    """A mask that allows some ids: int32 words [ceil(vocab_size / 32)], id i in bit i % 32 of word i // 32."""
    bits = bytearray(-(-vocab_size // 32) * 4)
    for token in allowed:
        bits[token // 8] |= 1 << token % 8
    return array("i", bytes(bits))
