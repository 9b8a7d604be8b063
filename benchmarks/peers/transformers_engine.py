"""transformers' `generate`, all prompts as one static batch: they must be of equal length."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.serving import Outcome, Prompt, serve


class _Counter(BaseStreamer):
    """Counts the steps of a batch; the first thing it is given is the prompt."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome, self._seen_prompt = outcome, False

    def put(self, value: torch.Tensor) -> None:
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        for job in range(len(self._outcome.produced)):
            self._outcome.add(job, 1)

    def end(self) -> None:
        pass


class Transformers:
    version = transformers.__version__

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()

    def run(self, prompts: list[Prompt], tokens: int) -> Outcome:
        ids = torch.tensor(prompts)
        outcome = Outcome(len(prompts))
        self._generate(ids, tokens, _Counter(outcome))
        return outcome.end()

    def _generate(self, ids: torch.Tensor, tokens: int, counter: _Counter) -> None:
        mask = torch.ones_like(ids)
        self._model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0,
            streamer=counter,
        )  # fmt: skip


if __name__ == "__main__":
    serve(Transformers)
