"""Changing logits before a token is chosen: penalties, bias, min_tokens, masks, in this order.

All but masks touch few tokens of a row, and only these are read and written. A token may be listed more than once in a
row; each time the same value is written, so the order does not matter.
"""

from array import array
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.sampling.rows import FLOAT_MAX, Rows, Trait
from engine.sequence import Sequence
from kernels import to_device, upload


def adjust(scores: Tensor, sequences: list[Sequence], traits: list[Trait], rows: Rows) -> bool:
    """Adjust scores [B, vocabulary] of these sequences, in place. False if there was nothing to do."""
    done = False
    for work, chosen in (
        (_penalise, [i for i, trait in enumerate(traits) if trait & Trait.PENALTY]),
        (_add_bias, [i for i, trait in enumerate(traits) if trait & Trait.BIAS]),
        (_forbid_ends, [i for i, trait in enumerate(traits) if trait & Trait.MIN_TOKENS and is_short(sequences[i])]),
        (_mask, [i for i, sequence in enumerate(sequences) if sequence.mask_source is not None]),
    ):
        if chosen:
            work(scores, upload(chosen, scores.device), [sequences[i] for i in chosen], rows)
            done = True
    return done


def is_short(sequence: Sequence) -> bool:
    """Whether the token that is about to be drawn (and is counted as pending) may not be the last one."""
    return sequence.length - sequence.prompt_length <= sequence.request.sampling.min_tokens


def _rewrite(scores: Tensor, chosen: Tensor, ids: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Change the scores of tokens ids [n, N] in rows chosen [n]. What overflows upwards becomes the largest float."""
    at = (chosen[:, None], ids)
    scores[at] = change(scores[at]).clamp_(max=FLOAT_MAX)


def _penalise(scores: Tensor, chosen: Tensor, sequences: list[Sequence], rows: Rows) -> None:
    """Repetition (Keskar et al. 2019) for all tokens of prompt and output; presence and frequency for the output's."""
    assert rows.history is not None
    index = _index(sequences, scores.device)
    ids = rows.history.tokens(index, [sequence.length - 1 for sequence in sequences])
    counts = rows.history.counts[index[:, None], ids]
    repetition, presence, frequency = (
        number.to(torch.float32)[:, None]
        for number in rows.numbers(index, "repetition_penalty", "presence_penalty", "frequency_penalty")
    )

    def change(values: Tensor) -> Tensor:
        values = torch.where(values > 0, values / repetition, values * repetition)
        return values - frequency * counts - presence * (counts > 0)

    _rewrite(scores, chosen, ids, change)


def _add_bias(scores: Tensor, chosen: Tensor, sequences: list[Sequence], rows: Rows) -> None:
    index, slots = _index(sequences, scores.device), [sequence.row for sequence in sequences]
    _rewrite(scores, chosen, rows.bias_ids.get(slots, index), rows.bias_values.get(slots, index).add)


def _forbid_ends(scores: Tensor, chosen: Tensor, sequences: list[Sequence], rows: Rows) -> None:
    ids = rows.end_ids.get([sequence.row for sequence in sequences], _index(sequences, scores.device))
    _rewrite(scores, chosen, ids, partial(torch.full_like, fill_value=-torch.inf))


def _mask(scores: Tensor, chosen: Tensor, sequences: list[Sequence], rows: Rows) -> None:
    """-inf for what the sequences' sources forbid."""
    everything = array("i", [-1]) * -(-scores.shape[1] // 32)
    masks = (sequence.mask_source.mask() for sequence in sequences if sequence.mask_source is not None)
    packed = torch.stack([torch.frombuffer(mask or everything, dtype=torch.int32) for mask in masks])
    forbidden = ~unpack(to_device(packed, scores.device), scores.shape[1])
    scores[chosen] = scores[chosen].masked_fill_(forbidden, -torch.inf)


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """Packed masks int32 [..., ceil(vocab_size / 32)] -> bool [..., vocab_size], True where allowed."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[..., None] >> places) & 1).flatten(-2)[..., :vocab_size].to(torch.bool)


def _index(sequences: list[Sequence], device: torch.device) -> Tensor:
    return upload([sequence.row for sequence in sequences], device)
