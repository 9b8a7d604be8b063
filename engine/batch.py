"""From a plan to the tensors of one step."""

from array import array
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.model import Inputs
from engine.plan import Entry, Plan
from kernels import AttentionBatch, Heads, to_device, upload, upload_all


@dataclass(slots=True)
class Batch:
    """One step on the device. Lists hold indices into the plan's entries."""

    plan: Plan
    inputs: Inputs
    first_tokens: dict[int, int]  # entry -> its first row of the step's tokens
    sampling: list[int]  # entries that sample, in the order of the tensors below
    sampling_rows: Tensor
    last_tokens: Tensor  # rows of the step's tokens whose logits are needed
    new_positions: Tensor  # positions of the tokens to be sampled
    checked: Tensor  # rows of the step's tokens whose hidden states must be finite
    owners: Tensor  # and the entry of each


def build_batch(
    plan: Plan, tables: Tensor, last_token: Tensor, block_size: int, heads: Heads, *, windowed: bool
) -> Batch:
    """Lay out the entries longest first, so that decodes are in the order in which attention wants them."""
    order = sorted(range(len(plan.entries)), key=lambda index: -(plan.entries[index].start + plan.entries[index].count))
    entries = [plan.entries[index] for index in order]
    firsts = [0, *accumulate(entry.count for entry in entries)]
    sampling = [slot for slot, entry in enumerate(entries) if entry.samples]
    checked = [
        (token, order[slot]) for slot in range(len(entries)) for token in _checked(entries, firsts, slot, windowed)
    ]
    lists = _lists(entries, firsts, [entries[slot] for slot in sampling], sampling, checked)
    rows, shifts, counts, sampling_rows, last_tokens, new_positions, watched, owners = upload_all(lists, tables.device)
    positions, token_rows = _positions(firsts[-1], rows, shifts, counts)
    lengths = [entry.start + entry.count for entry in entries]
    inputs = Inputs(
        ids=_token_ids(entries, firsts, rows, last_token),
        positions=positions,
        rows=token_rows,
        blocks=tables[token_rows, positions // block_size],
        offsets=positions % block_size,
        attention=AttentionBatch([entry.count for entry in entries], lengths, tables[rows], block_size, heads),
    )
    return Batch(
        plan=plan,
        inputs=inputs,
        first_tokens={index: firsts[slot] for slot, index in enumerate(order)},
        sampling=[order[slot] for slot in sampling],
        sampling_rows=sampling_rows,
        last_tokens=last_tokens,
        new_positions=new_positions,
        checked=watched,
        owners=owners,
    )


def _lists(
    entries: list[Entry], firsts: list[int], sampled: list[Entry], sampling: list[int], checked: list[tuple[int, int]]
) -> tuple[list[int], ...]:
    """What the device is told of a step, for one copy: rows, shifts and counts of entries, then as `Batch` names it."""
    return (
        [entry.row for entry in entries],
        [entry.start - first for entry, first in zip(entries, firsts[:-1], strict=True)],
        [entry.count for entry in entries],
        [entry.row for entry in sampled],
        [firsts[slot + 1] - 1 for slot in sampling],
        [entry.start + entry.count for entry in sampled],
        [token for token, _ in checked],
        [owner for _, owner in checked],
    )


def _checked(entries: list[Entry], firsts: list[int], slot: int, windowed: bool) -> range:
    """The tokens of an entry that show whether its KV can be trusted.

    Attention carries a NaN to every later position, so the last one shows it, and where the entry samples, its logits
    do. Past a window nothing is carried: there each position answers for itself.
    """
    end = firsts[slot + 1]
    if windowed:
        return range(firsts[slot], end)
    return range(end, end) if entries[slot].samples else range(end - 1, end)


def _positions(tokens: int, rows: Tensor, shifts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The position and the row of every token; an entry's position is its token's number and a shift."""
    numbers = torch.arange(tokens, device=rows.device)
    if tokens == len(rows):
        return numbers + shifts, rows
    # Told how many there are, so that nobody has to ask the device.
    shifts, rows = (of.repeat_interleave(counts, output_size=tokens) for of in (shifts, rows))
    return numbers + shifts, rows


def _token_ids(entries: list[Entry], firsts: list[int], rows: Tensor, last_token: Tensor) -> Tensor:
    """Input ids [T]: from the host, but for those that were sampled last step and are only on the device."""
    if all(entry.fed for entry in entries):
        return last_token[rows]
    host = array("i")
    fed: list[tuple[int, int]] = []
    for slot, entry in enumerate(entries):
        if entry.fed:
            fed.append((firsts[slot], entry.row))
            host.append(0)
        else:
            host.extend(entry.sequence.tokens[entry.start : entry.start + entry.count])
    ids = to_device(torch.frombuffer(host, dtype=torch.int32), last_token.device).to(torch.int64)
    if fed:
        slots, fed_rows = upload(fed, last_token.device).T
        ids[slots] = last_token[fed_rows]
    return ids
