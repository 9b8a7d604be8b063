"""What the sampler keeps of each running sequence, on the device, in its row: set up at admission, read every step."""

from collections.abc import Sequence as Ordered
from enum import IntFlag, auto

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sequence import Sequence
from kernels import upload

FLOAT_MAX = torch.finfo(torch.float32).max
_COLUMNS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class Trait(IntFlag):
    """What a request asks of the sampler. Known to the host, so that a step pays only for what its batch uses."""

    RANDOM = auto()
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    PENALTY = auto()
    BIAS = auto()
    MIN_TOKENS = auto()
    LOGPROBS = auto()
    FILTER = TOP_K | TOP_P | MIN_P


def traits_of(sampling: SamplingParams, vocab_size: int, *, greedy: bool) -> Trait:
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    asked = {
        Trait.RANDOM: not greedy,
        Trait.TOP_K: 0 < sampling.top_k < vocab_size,
        Trait.TOP_P: sampling.top_p < 1.0,
        Trait.MIN_P: sampling.min_p > 0.0,
        Trait.PENALTY: penalties != (0.0, 0.0, 1.0),
        Trait.BIAS: bool(sampling.logit_bias),
        Trait.MIN_TOKENS: sampling.min_tokens > 0,
        Trait.LOGPROBS: sampling.logprobs is not None,
    }
    return Trait(sum(trait for trait, wanted in asked.items() if wanted))


class Lists:
    """A list of numbers per row. A row is padded with its own last number: to write that once more changes nothing."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._values = torch.zeros((rows, 1), dtype=dtype, device=device)
        self._lengths = [0] * rows

    def set(self, row: int, values: Ordered[float]) -> None:
        """Give a row its numbers, at least one."""
        missing = len(values) - self._values.shape[1]
        if missing > 0:
            padding = self._values[:, -1:].expand(-1, missing)
            self._values = torch.cat((self._values, padding), 1)
        self._lengths[row] = len(values)
        new = upload(values, self._values.device, self._values.dtype)
        self._values[row, : len(values)] = new
        self._values[row, len(values) :] = new[-1]

    def get(self, rows: list[int], index: Tensor) -> Tensor:
        """The lists of some rows (on the host and as a tensor), as wide as the longest of them."""
        return self._values[index, : max(self._lengths[row] for row in rows)]


class History:
    """Every token of the rows with penalties, and how often each was put out. Made when the first such row comes."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._tokens = torch.zeros((rows, 0), dtype=torch.int32, device=device)
        self.counts = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)

    def open(self, row: int, tokens: Ordered[int], prompt_length: int) -> None:
        self._reserve(len(tokens) + 1)
        known = upload(tokens, self.counts.device, torch.int32)
        self._tokens[row, : len(tokens)] = known
        output = known[prompt_length:]
        self.counts[row].zero_().index_add_(0, output, torch.ones_like(output))

    def tokens(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """The first so many tokens of some rows, int64 [n, longest]; shorter rows repeat their last one."""
        columns = torch.arange(max(lengths), device=rows.device)
        last = upload(lengths, rows.device)[:, None] - 1
        return self._tokens[rows[:, None], torch.minimum(columns, last)].to(torch.int64)

    def append(self, rows: Tensor, lengths: list[int], ids: Tensor) -> None:
        """New tokens ids [n], behind the first `lengths` tokens of their rows."""
        self._reserve(max(lengths) + 1)
        self._tokens[rows, upload(lengths, rows.device)] = ids.to(torch.int32)
        self.counts[rows, ids] += 1

    def _reserve(self, length: int) -> None:
        width = self._tokens.shape[1]
        if length > width:
            wider = self._tokens.new_zeros(len(self._tokens), max(length, 2 * width) - width)
            self._tokens = torch.cat((self._tokens, wider), 1)


class Rows:
    """Sampling parameters by row. `history` is None until a row with penalties comes."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._device, self._vocab_size, self._rows = device, vocab_size, rows
        self._numbers = torch.zeros((rows, len(_COLUMNS)), dtype=torch.float64, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.traits = [Trait(0)] * rows
        self.bias_ids = Lists(rows, torch.int64, device)
        self.bias_values = Lists(rows, torch.float32, device)
        self.end_ids = Lists(rows, torch.int64, device)
        self.history: History | None = None

    def open(self, sequence: Sequence) -> None:
        """Set up the row of a sequence that was admitted."""
        row, sampling = sequence.row, sequence.request.sampling
        numbers = [float(min(getattr(sampling, name), FLOAT_MAX)) for name in _COLUMNS]
        self._numbers[row] = upload(numbers, self._device, torch.float64)
        self.seeds[row] = sequence.seed - 2**64 if sequence.seed >= 2**63 else sequence.seed
        self.traits[row] = traits_of(sampling, self._vocab_size, greedy=sequence.greedy)
        self._open_lists(sequence)

    def _open_lists(self, sequence: Sequence) -> None:
        row, sampling = sequence.row, sequence.request.sampling
        if self.traits[row] & Trait.BIAS:
            self.bias_ids.set(row, list(sampling.logit_bias))
            self.bias_values.set(row, list(sampling.logit_bias.values()))
        if self.traits[row] & Trait.MIN_TOKENS:
            ends = [token for token in sorted(sequence.end_ids) if token < self._vocab_size]  # files may name others
            if ends:
                self.end_ids.set(row, ends)
            else:
                self.traits[row] &= ~Trait.MIN_TOKENS
        if self.traits[row] & Trait.PENALTY:
            if self.history is None:
                self.history = History(self._rows, self._vocab_size, self._device)
            self.history.open(row, sequence.tokens, sequence.prompt_length)

    def numbers(self, rows: Tensor, *names: str) -> list[Tensor]:
        """Parameters of some rows, float64 [n] each."""
        chosen = self._numbers[rows]
        return [chosen[:, _COLUMNS.index(name)] for name in names]
