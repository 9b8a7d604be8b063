"""From a plan to the tensors of one step."""

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model import Inputs
from engine.plan import Entry, Plan
from kernels import AttentionBatch, Heads


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
    scoring: list[int]  # entries whose prompt_logprobs are asked for
    checked: Tensor  # rows of the step's tokens whose hidden states must be finite
    owners: Tensor  # and the entry of each


def build_batch(
    plan: Plan, tables: Tensor, last_token: Tensor, block_size: int, heads: Heads, *, windowed: bool
) -> Batch:
    """Lay out the entries longest first, so that decodes are in the order in which attention wants them."""
    order = sorted(range(len(plan.entries)), key=lambda index: -(plan.entries[index].start + plan.entries[index].count))
    entries = [plan.entries[index] for index in order]
    device = tables.device
    counts = [entry.count for entry in entries]
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    rows = torch.tensor([entry.row for entry in entries], device=device)
    positions, token_rows = _positions(entries, firsts, rows)
    inputs = Inputs(
        ids=_token_ids(entries, firsts, last_token),
        positions=positions,
        rows=token_rows,
        blocks=tables[token_rows, positions // block_size],
        offsets=positions % block_size,
        attention=AttentionBatch(counts, [e.start + e.count for e in entries], tables[rows], block_size, heads),
    )
    sampling = [slot for slot, entry in enumerate(entries) if entry.samples]
    checked = [
        (token, order[slot]) for slot in range(len(entries)) for token in _checked(entries, firsts, slot, windowed)
    ]
    return Batch(
        plan=plan,
        inputs=inputs,
        first_tokens={index: firsts[slot] for slot, index in enumerate(order)},
        sampling=[order[slot] for slot in sampling],
        sampling_rows=torch.tensor([entries[slot].row for slot in sampling], dtype=torch.int64, device=device),
        last_tokens=torch.tensor([firsts[slot + 1] - 1 for slot in sampling], dtype=torch.int64, device=device),
        new_positions=torch.tensor(
            [entries[slot].start + entries[slot].count for slot in sampling], dtype=torch.int64, device=device
        ),
        scoring=[order[slot] for slot, entry in enumerate(entries) if _scores(entry)],
        checked=torch.tensor([token for token, _ in checked], dtype=torch.int64, device=device),
        owners=torch.tensor([index for _, index in checked], dtype=torch.int64, device=device),
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


def _positions(entries: list[Entry], firsts: list[int], rows: Tensor) -> tuple[Tensor, Tensor]:
    """The position and the row of every token of the step."""
    starts = torch.tensor([entry.start for entry in entries], device=rows.device)
    if firsts[-1] == len(entries):
        return starts, rows
    counts = torch.tensor([entry.count for entry in entries], device=rows.device)
    shift = starts - torch.tensor(firsts[:-1], device=rows.device)
    return torch.arange(firsts[-1], device=rows.device) + shift.repeat_interleave(counts), rows.repeat_interleave(
        counts
    )


def _token_ids(entries: list[Entry], firsts: list[int], last_token: Tensor) -> Tensor:
    """Input ids [T]: from the host, but for those that were sampled last step and are only on the device."""
    host = array("i")
    fed: list[tuple[int, int]] = []
    for slot, entry in enumerate(entries):
        if entry.fed:
            fed.append((firsts[slot], entry.row))
            host.append(0)
        else:
            host.extend(entry.sequence.tokens[entry.start : entry.start + entry.count])
    ids = torch.frombuffer(host, dtype=torch.int32).to(last_token.device, torch.int64)
    if fed:
        slots, rows = torch.tensor(fed, device=last_token.device).T
        ids[slots] = last_token[rows]
    return ids


def _scores(entry: Entry) -> bool:
    sequence = entry.sequence
    return (
        sequence.wants_prompt_logprobs
        and len(sequence.prompt_logprobs) < sequence.prompt_length
        and (entry.start < sequence.prompt_length)
    )
