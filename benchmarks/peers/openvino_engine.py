"""OpenVINO GenAI's continuous batching pipeline. Options: model (its own directory), threads, cache_gigabytes."""

from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.serving import Outcome, Prompt, serve


class OpenVino:
    version = openvino_genai.__version__

    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = options["cache_gigabytes"]
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 32, 2048
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_PRECISION_HINT": options["precision"], "INFERENCE_NUM_THREADS": options["threads"]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["model"], scheduler_config=scheduler, device="CPU", properties=properties
        )
        self._runs = 0

    def run(self, prompts: list[Prompt], tokens: int) -> Outcome:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        outcome = Outcome(len(prompts))
        handles = []
        for prompt in prompts:
            self._runs += 1
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._runs, ids, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for job, handle in enumerate(handles):
                if handle.can_read():
                    outcome.add(job, sum(len(output.generated_ids) for output in handle.read().values()))
        return outcome.end()


if __name__ == "__main__":
    serve(OpenVino)
