"""What a step of one form does on the device: prepare, embed, layers, head, choose, and remember the token.

Its buffers are made once, and no number of the host's goes into it but what lies in the buffer that was sent: so a CUDA
graph can hold it, see engine/graphs.py.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.graphs import Form, Tail
from engine.model import Inputs
from engine.stepper import Parts
from kernels import Lottery, Resident, ResidentBatch, State, Step

HEADER = 4  # words before all else; the first one counts the differences
RECORDS = 1024  # differences that a step carries out; more are sent before it


@dataclass(slots=True)
class Kept:
    """What all works share on the device. `sent` int32 is what the host sent; `logits` [rows, vocabulary] float32."""

    parts: Parts
    resident: Resident
    state: State
    lottery: Lottery
    sent: Tensor
    logits: Tensor
    cache: list[Tensor] = field(default_factory=list[Tensor])


class StepWork:
    """One form of a step. `results` int32 [3, entries]: tokens, whether logits and whether states are not finite.

    `sent` has for a step that is not of `decodes`: entries int32 [4, entries] and ids [tokens], as `Resident.open` has
    them; then the differences. `splits`: see ResidentBatch. `keeps`: its hidden states stay.
    """

    def __init__(self, kept: Kept, form: Form, splits: int, *, keeps: bool = False) -> None:
        device = kept.parts.device
        self._kept, self.form, self._splits, self._keeps = kept, form, splits, keeps
        self._step = Step.make(form.tokens, form.entries, device)
        self.results = torch.zeros((3, form.entries), dtype=torch.int32, device=device)
        self.hidden: Tensor | None = None
        self.records_at = HEADER if form.decodes else HEADER + 4 * form.entries + -(-form.tokens // 4) * 4

    def __call__(self) -> None:
        kept, step = self._kept, self._step
        self._prepare()
        batch = ResidentBatch(kept.state, step, kept.parts.heads, self.form.decodes, self._splits)
        rows = step.rows if self.form.decodes else step.token_rows
        inputs = Inputs(step.ids, step.positions, rows, step.blocks, step.offsets, batch)
        hidden = kept.parts.model.forward(inputs, kept.cache)
        self._choose(self._look_at(hidden))
        if self._keeps:
            self.hidden = hidden

    def _prepare(self) -> None:
        kept, form = self._kept, self.form
        records = kept.sent[self.records_at :][: 2 * RECORDS].view(-1, 2)
        kept.resident.apply(kept.state, kept.sent[:1], records)
        if form.decodes:
            kept.resident.advance(kept.state, self._step)
        else:
            entries, ids = kept.sent[HEADER:].split([4 * form.entries, len(kept.sent) - HEADER - 4 * form.entries])
            kept.resident.open(kept.state, self._step, entries.view(4, -1), ids[: form.tokens])

    def _look_at(self, hidden: Tensor) -> Tensor:
        """The states [entries, hidden] that tokens are chosen from; notes whether those that are checked are finite.

        Where all decode, their logits show it. Attention carries a NaN to every later position, so the last one of an
        entry shows it. Past a window nothing is carried: there each position answers for itself.
        """
        if self.form.decodes:
            return hidden
        last = hidden[(self._step.starts[1:] - 1).clamp_(min=0).long()]
        if self._kept.parts.windowed:
            wrong = (~torch.isfinite(hidden).all(-1)).to(torch.int32)
            counts = torch.zeros(self._kept.parts.rows + 1, dtype=torch.int32, device=hidden.device)
            self.results[2].copy_(counts.index_add_(0, self._step.token_rows, wrong)[self._step.rows.long()])
        else:
            self.results[2].copy_(~torch.isfinite(last).all(-1))
        return last

    def _choose(self, hidden: Tensor) -> None:
        kept, step, tail = self._kept, self._step, self.form.tail
        logits = kept.parts.logits(hidden)
        if tail is Tail.LOGITS:
            kept.logits[: len(logits)].copy_(logits)
        random = tail > Tail.GREEDY
        kept.lottery.draw(
            logits, step.rows, step.ends, kept.state.parameters, self.results[0], self.results[1],
            random=random, filtered=random,
        )  # fmt: skip
