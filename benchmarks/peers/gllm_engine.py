"""gllm's engine, in this process, with a worker's defaults."""

from importlib.metadata import version
from typing import Any

from benchmarks.peers.serving import Outcome, Prompt, serve
from engine import Engine, EngineConfig, Request, SamplingParams


class Gllm:
    version = version("gllm")

    def __init__(self, options: dict[str, Any]) -> None:
        self._engine = Engine(EngineConfig(device="cpu", max_sequences=32, **options))
        self._runs = 0

    def run(self, prompts: list[Prompt], tokens: int) -> Outcome:
        self._runs += 1
        jobs = {f"{self._runs}-{index}": index for index in range(len(prompts))}
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        outcome = Outcome(len(prompts))
        for job, index in jobs.items():
            self._engine.add(Request(id=job, tokens=prompts[index], sampling=sampling))
        while self._engine.busy:
            for delta in self._engine.step():
                assert delta.error is None, delta.error
                outcome.add(jobs[delta.id], len(delta.tokens))
        return outcome.end()


if __name__ == "__main__":
    serve(Gllm)
