"""Steps prepared from a device's state, and tokens drawn, in plain torch: what the kernels' versions have to mean.

As in those, no size depends on a number of the device's. For tests: on a CPU the host knows all that anyway.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.noise import gumbel, row_keys
from kernels.resident import Lottery, Parameters, State, Step

UNIT = 2.0**35  # the likeliest token's weight; see engine/sampling/filters.py


class PlainResident:
    """See `Resident`."""

    def apply(self, state: State, count: Tensor, records: Tensor) -> None:
        there = torch.arange(len(records), device=records.device) < count
        address, word = records.unbind(1)
        nobody = len(state.memory) - 1
        state.memory[torch.where(there, address, nobody).long()] = torch.where(there, word, 0)

    def advance(self, state: State, step: Step) -> None:
        count = len(step.rows)
        rows = state.places[:count].long()
        live = rows != state.padding_row
        positions = torch.where(live, state.lengths[rows], 0)
        self._place(state, step, rows, positions, live)
        step.ids.copy_(torch.where(live, state.last_tokens[rows], 0))
        step.rows.copy_(rows)
        step.ends.copy_(torch.where(live, positions + 1, 0))
        step.starts.copy_(torch.arange(count + 1, device=rows.device))
        state.lengths[rows] = step.ends

    def open(self, state: State, step: Step, entries: Tensor, sent: Tensor) -> None:
        rows, first, tokens, fed = entries.long()
        step.rows.copy_(rows)
        step.starts[0] = 0
        step.starts[1:] = tokens.cumsum(0)
        ends = torch.where(tokens > 0, first + tokens, 0)
        step.ends.copy_(ends)
        state.lengths[torch.where(tokens > 0, rows, state.padding_row)] = ends.int()
        t = torch.arange(len(step.ids), device=rows.device)
        entry = (step.starts[1:] <= t[:, None]).sum(1)
        live, entry = entry < len(rows), entry.clamp(max=len(rows) - 1)
        row = torch.where(live, rows[entry], state.padding_row)
        positions = torch.where(live, first[entry] + t - step.starts[entry], 0)
        self._place(state, step, row, positions, live)
        known = torch.where(fed[entry] > 0, state.last_tokens[row], sent)
        step.ids.copy_(torch.where(live, known, 0))
        step.token_rows.copy_(row)

    def _place(self, state: State, step: Step, rows: Tensor, positions: Tensor, live: Tensor) -> None:
        blocks = state.tables[rows, positions.long() // state.block_size]
        step.positions.copy_(positions)
        step.blocks.copy_(torch.where(live, blocks, state.padding_block))
        step.offsets.copy_(positions % state.block_size)

    def splits(self, lengths: Sequence[int]) -> int:
        return 0

    def lottery(self, most: int, vocab: int, device: torch.device) -> Lottery:
        return PlainLottery()


class PlainLottery:
    """See `Lottery`. Sorts the vocabulary, and gives noise to all of it."""

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        parameters: Parameters,
        out: Tensor,
        broken: Tensor,
        *,
        random: bool,
        filtered: bool,
    ) -> None:
        index, best = rows.long(), logits.amax(-1, keepdim=True)
        ids = _lowest(logits == best)
        if random:
            temperatures = parameters.temperatures[index][:, None]
            scores = (logits - best) / temperatures
            if filtered:
                scores = scores.masked_fill(scores < _floors(scores, index, parameters)[:, None], -torch.inf)
            everyone = torch.arange(logits.shape[1], device=logits.device)
            totals = scores + gumbel(row_keys(parameters.seeds[index], positions), everyone)
            drawn = _lowest(totals == totals.amax(-1, keepdim=True))
            ids = torch.where(temperatures.squeeze(1) > 0, drawn, ids)
        wrong = ~torch.isfinite(best.squeeze(1))
        ids = torch.where(wrong, 0, ids)
        out.copy_(ids)
        broken.copy_(wrong)
        parameters.last_tokens[index] = ids.int()


def _lowest(found: Tensor) -> Tensor:
    """The lowest column [B] that is True, of found [B, N]."""
    columns = torch.arange(found.shape[1], device=found.device)
    return torch.where(found, columns, 2**31 - 1).amin(-1)


def _floors(scores: Tensor, index: Tensor, parameters: Parameters) -> Tensor:
    """The lowest score [B] that top-k, top-p and min-p keep of scores [B, N]."""
    ordered, last = scores.sort(-1, descending=True).values, scores.shape[1] - 1
    top_k, top_p = parameters.top_ks[index].long(), parameters.top_ps[index]
    kept = torch.where(top_k > 0, ordered.gather(1, (top_k - 1).clamp(0, last)[:, None]).squeeze(1), -torch.inf)
    weights = ordered.masked_fill(ordered < kept[:, None], -torch.inf).exp().mul_(UNIT).floor_()
    mass = weights.cumsum(-1, dtype=torch.float64)
    end = (mass < mass[:, -1:] * top_p[:, None]).sum(-1).clamp(max=last)
    nucleus = torch.where(top_p < 1, ordered.gather(1, end[:, None]).squeeze(1), -torch.inf)
    return torch.maximum(torch.maximum(kept, nucleus), parameters.min_floors[index])
