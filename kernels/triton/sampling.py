# pyright: reportMissingImports=false, reportIndexIssue=false
"""Launching the sampler: up to five kernels, none of which waits for the host. Buffers are made once."""

import torch
from torch import Tensor

from kernels.resident import Parameters
from kernels.triton.floors import candidates, find_floors
from kernels.triton.lottery import choose, chunk_best, draw
from kernels.triton.shapes import power_of_two

CHUNK = 4096  # logits a program looks at
SMALL = {"num_warps": 4, "num_stages": 1}
WIDE = {"num_warps": 8, "num_stages": 1}


class Lottery:
    """Draws tokens for up to `most` rows of logits over `vocab` tokens."""

    def __init__(self, most: int, vocab: int, device: torch.device) -> None:
        self._vocab, self._chunks = vocab, -(-vocab // CHUNK)
        self._values, self._totals = torch.empty(2, most, self._chunks, dtype=torch.float32, device=device)
        self._tokens, self._winners = torch.empty(2, most, self._chunks, dtype=torch.int32, device=device)
        self._floors = torch.empty(most, dtype=torch.float32, device=device)
        self._counters = torch.empty(most, dtype=torch.int32, device=device)
        self._found = torch.empty(0, device=device)

    def reserve_filters(self) -> None:
        """Make room for what top-k and top-p look at, as large as the logits: once, before a graph is captured."""
        if not len(self._found):
            self._found = self._values.new_empty(len(self._floors), self._vocab)

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
        """See kernels.resident.Lottery."""
        count, padded = len(rows), power_of_two(self._chunks)
        assert logits.stride(1) == 1
        assert logits.shape[1] == self._vocab
        row, grid = logits.stride(0), (count, self._chunks)
        chunk_best[grid](logits, self._values, self._tokens, self._counters, row, self._vocab, chunk=CHUNK, **WIDE)
        totals, winners = self._values, self._tokens
        if random and filtered:
            self._find_floors(logits, rows, parameters)
        if random:
            totals, winners = self._totals, self._winners
            draw[grid](
                logits, self._values, self._tokens, self._floors, rows, parameters.temperatures, parameters.seeds,
                positions, totals, winners, row, self._vocab, chunk=CHUNK, padded=padded, filtered=filtered, **WIDE,
            )  # fmt: skip
        choose[(count,)](
            self._values, totals, winners, rows, parameters.last_tokens, out, broken, self._chunks,
            padded=padded, num_warps=1, num_stages=1,
        )  # fmt: skip

    def _find_floors(self, logits: Tensor, rows: Tensor, parameters: Parameters) -> None:
        self.reserve_filters()
        count, padded, asked = len(rows), power_of_two(self._chunks), parameters
        candidates[(count, self._chunks)](
            logits, self._values, rows, asked.temperatures, asked.top_ks, asked.top_ps, self._counters, self._found,
            logits.stride(0), self._vocab, chunk=CHUNK, padded=padded, **WIDE,
        )  # fmt: skip
        find_floors[(count,)](
            logits, self._values, rows, asked.temperatures, asked.top_ks, asked.top_ps, asked.min_floors,
            self._counters, self._found, self._floors, logits.stride(0), self._vocab, self._chunks,
            block=CHUNK, padded=padded, **WIDE,
        )  # fmt: skip
