"""vLLM on a CPU, its offline engine stepped here. Options: model, threads, cache_gigabytes."""

import os
from typing import Any

from benchmarks.peers.serving import Outcome, Prompt, serve


class Vllm:
    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(options["cache_gigabytes"]),
            VLLM_CPU_OMP_THREADS_BIND=options["bind"],
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
            HF_HUB_OFFLINE="1",
        )
        import vllm  # reads the variables above when it is imported

        self.version = vllm.__version__
        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            options["model"], dtype="bfloat16", max_model_len=2048, max_num_seqs=32, enable_prefix_caching=True
        )
        self._runs = 0

    def run(self, prompts: list[Prompt], tokens: int) -> Outcome:
        sampling = self._sampling(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        engine, outcome, jobs, counts = self._llm.llm_engine, Outcome(len(prompts)), {}, [0] * len(prompts)
        for job, prompt in enumerate(prompts):
            self._runs += 1
            jobs[str(self._runs)] = job
            engine.add_request(str(self._runs), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                job, count = jobs[output.request_id], len(output.outputs[0].token_ids)
                outcome.add(job, count - counts[job])
                counts[job] = count
        return outcome.end()


if __name__ == "__main__":
    serve(Vllm)
