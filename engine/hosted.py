"""Steps whose batches are prepared by the host, which knows all lengths: the way of a CPU, and of plain torch."""

from time import perf_counter_ns

import torch
from torch import Tensor

from engine.batch import Batch, build_batch
from engine.handle import Draws, Handle
from engine.model import Inputs
from engine.plan import Plan, Sampled
from engine.sampler import Drawn
from engine.scoring import PromptScores
from engine.stepper import Parts
from kernels import Arrival, AttentionBatch, download, upload


class HostedStepper:
    """See `Stepper`. On the device are block tables, last tokens and what the sampler keeps of each row."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self.device_ns = parts, 0
        shape = (parts.rows + 1, parts.columns)
        self.tables = torch.zeros(shape, dtype=torch.int64, device=parts.device)
        self._last_token = torch.zeros(parts.rows + 1, dtype=torch.int64, device=parts.device)
        self._cache: list[Tensor] = []

    def open_pool(self, cache: list[Tensor], padding_block: int) -> None:
        self._cache = cache
        self.tables.fill_(padding_block)

    def warm_up(self) -> None:
        """One padded step: threads, row probes."""
        parts, table = self._parts, self.tables[-1:, :1].repeat(1, 2)  # blocks of one token hold two in two
        for count in (1, 2):
            attention = AttentionBatch([count], [count], table, parts.block_size, parts.heads)
            zeros = torch.zeros(count, dtype=torch.int64, device=parts.device)
            inputs = Inputs(zeros, zeros, zeros, zeros + table[0, 0], zeros, attention)
            parts.model.logits(parts.model.forward(inputs, self._cache))

    def launch(self, plan: Plan) -> Handle:
        parts = self._parts
        self._apply_differences(plan)
        batch = build_batch(plan, self.tables, self._last_token, parts.block_size, parts.heads, windowed=parts.windowed)
        began = perf_counter_ns()
        hidden = parts.model.forward(batch.inputs, self._cache)
        draws: list[Draws] = []
        if batch.sampling:
            drawn = self._draw(hidden, batch).download()
            draws.append(Draws(drawn, batch.sampling, range(len(batch.sampling))))
        broken = download(_find_broken(hidden, batch))
        handle = Handle(plan, draws, broken, Arrival(parts.device))
        for index, entry in enumerate(plan.entries):
            if PromptScores.wanted(entry):
                states = hidden[batch.first_tokens[index] :][: entry.count]
                handle.prompts[index] = PromptScores(entry, states, parts.logits)
        handle.arrival.start()
        if parts.device.type == "cpu":
            self.device_ns += perf_counter_ns() - began
        return handle

    def collect(self, handle: Handle) -> Sampled:
        began = perf_counter_ns()
        sampled = handle.read()
        self.device_ns += perf_counter_ns() - began  # next to nothing but the wait
        return sampled

    def _apply_differences(self, plan: Plan) -> None:
        for sequence in plan.opened:
            self._parts.sampler.open(sequence)
            self._parts.model.open(sequence.row, sequence.longest)
        if plan.blocks:
            rows, columns, blocks = upload(plan.blocks, self._parts.device).T
            self.tables[rows, columns] = blocks

    def _draw(self, hidden: Tensor, batch: Batch) -> Drawn:
        sequences = [batch.plan.entries[index].sequence for index in batch.sampling]
        drawn = self._parts.sampler.draw(self._parts.logits(hidden[batch.last_tokens]), sequences, batch.new_positions)
        self._last_token[batch.sampling_rows] = drawn.ids
        return drawn


def _find_broken(hidden: Tensor, batch: Batch) -> Tensor:
    """For each entry of the plan, whether a checked hidden state of it is not finite."""
    wrong = ~torch.isfinite(hidden[batch.checked]).all(-1)
    counts = torch.zeros(len(batch.plan.entries), dtype=torch.int32, device=hidden.device)
    return counts.index_add_(0, batch.owners, wrong.to(torch.int32)) > 0
