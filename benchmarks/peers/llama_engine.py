"""llama.cpp through its own C interface, all jobs in one batch, as its server does it; shared prefixes are copied.

Options: model (GGUF), threads, context (tokens of all jobs together).
"""

from typing import Any

import llama_cpp as llama
import numpy as np

from benchmarks.peers.serving import Outcome, Prompt, serve

BATCH_TOKENS = 2048  # of one call, as its server's default


class Llama:
    version = llama.__version__

    def __init__(self, options: dict[str, Any]) -> None:
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(options["model"].encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = options["context"], BATCH_TOKENS, 512
        params.n_seq_max = 17
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = options["threads"]
        self._context = llama.llama_init_from_model(model, params)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._kept: Prompt = []  # what sequence 16 holds: the last prompt that came alone

    def run(self, prompts: list[Prompt], tokens: int) -> Outcome:
        outcome = Outcome(len(prompts))
        starts = [self._share(job, prompt) for job, prompt in enumerate(prompts)]
        last = self._prefill(prompts, starts, outcome)
        for step in range(1, tokens):
            last = self._decode(last, [len(prompt) + step - 1 for prompt in prompts], outcome)
        if len(prompts) == 1:
            self._keep(prompts[0])
        return outcome.end()

    def _share(self, job: int, prompt: Prompt) -> int:
        """Empty a sequence, copy what it has in common with the kept prompt, and return how much that is."""
        llama.llama_memory_seq_rm(self._memory, job, -1, -1)
        common = 0
        while common < min(len(self._kept), len(prompt) - 1) and self._kept[common] == prompt[common]:
            common += 1
        if common:
            llama.llama_memory_seq_cp(self._memory, 16, job, 0, common)
        return common

    def _keep(self, prompt: Prompt) -> None:
        llama.llama_memory_seq_rm(self._memory, 16, -1, -1)
        llama.llama_memory_seq_cp(self._memory, 0, 16, 0, len(prompt))
        self._kept = prompt

    def _prefill(self, prompts: list[Prompt], starts: list[int], outcome: Outcome) -> list[int]:
        """All prompts, as many tokens a call as fit; the first token of each."""
        rows = [
            (token, position, job, position == len(prompt) - 1)
            for job, (prompt, start) in enumerate(zip(prompts, starts, strict=True))
            for position, token in enumerate(prompt[start:], start)
        ]
        first = [0] * len(prompts)
        for begin in range(0, len(rows), BATCH_TOKENS):
            part = rows[begin : begin + BATCH_TOKENS]
            self._call(part)
            for row, (_, _, job, last) in enumerate(part):
                if last:
                    first[job] = self._best(row)
                    outcome.add(job, 1)
        return first

    def _decode(self, last: list[int], positions: list[int], outcome: Outcome) -> list[int]:
        self._call(
            [(token, position, job, True) for job, (token, position) in enumerate(zip(last, positions, strict=True))]
        )
        best = [self._best(row) for row in range(len(last))]
        for job in range(len(last)):
            outcome.add(job, 1)
        return best

    def _call(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, job, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, job
            batch.logits[index] = wanted
        status = llama.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode: {status}"

    def _best(self, row: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


if __name__ == "__main__":
    serve(Llama)
