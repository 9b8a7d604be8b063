"""The other side: plain `transformers.generate` on the same weights, in the same process, on the same threads."""

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from benchmarks.ours import Prompt, Run


class _FirstToken(StoppingCriteria):
    """Notes when the first token was there; stops nothing."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: object, **_: object) -> torch.BoolTensor:
        self.at = self.at or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)  # type: ignore[return-value]


class Transformers:
    """Plain `generate` on the same weights: one by one, or as a static batch of prompts of equal length."""

    def __init__(self, model: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(self, prompts: list[Prompt], new_tokens: int) -> Run:
        """All prompts in one static batch, greedily, `new_tokens` each."""
        ids = torch.tensor(prompts)
        clock, start = _FirstToken(), time.perf_counter()
        out = self._model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        end = time.perf_counter()
        assert clock.at is not None
        return Run(clock.at - start, end - start, out[:, ids.shape[1] :].tolist())

    def run_one_by_one(self, prompts: list[Prompt], new_tokens: int) -> Run:
        """The prompts one after the other, as if one: times add up."""
        runs = [self.run([prompt], new_tokens) for prompt in prompts]
        replies = [reply for run in runs for reply in run.tokens]
        return Run(sum(run.first_tokens for run in runs), sum(run.total for run in runs), replies)
