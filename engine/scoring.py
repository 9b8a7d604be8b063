"""Log-probabilities of a prompt's tokens, from the hidden states of a step."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.plan import Entry
from engine.request import TokenLogprob
from engine.sampling.logprobs import Scored, score_tokens
from kernels import download, upload

LOGIT_ROWS = 64  # prompt positions per vocabulary product: bounds the memory of prompt_logprobs


class PromptScores:
    """What one entry's positions say of the prompt tokens that they predict; on its way to the host."""

    def __init__(self, entry: Entry, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        """`hidden` are the states of the entry's positions, `logits` makes logits of some."""
        sequence = entry.sequence
        end = min(entry.start + entry.count, sequence.prompt_length - 1)
        targets = upload(sequence.tokens[entry.start + 1 : end + 1], hidden.device)
        best = sequence.request.sampling.prompt_logprobs or 0
        self._scored, self._finite = list[Scored](), list[Tensor]()
        for part, ids in zip(hidden[: len(targets)].split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
            predicted = logits(part)
            self._finite.append(download(torch.isfinite(predicted.amax(-1)).all()))
            self._scored.append(score_tokens(predicted, ids, [best] * len(ids)).download())

    @staticmethod
    def wanted(entry: Entry) -> bool:
        sequence = entry.sequence
        return (
            sequence.wants_prompt_logprobs
            and len(sequence.prompt_logprobs) < sequence.prompt_length
            and entry.start < sequence.prompt_length
        )

    @property
    def finite(self) -> bool:
        """Whether the logits were finite; on the host."""
        return all(self._finite)

    def rows(self) -> list[TokenLogprob]:
        """On the host, one for each token predicted."""
        return [row for part in self._scored for row in part.rows()]
