"""An engine for the tests of benchmarks/peers: it makes tokens of nothing, and breaks when it is asked for 13."""

from typing import Any

from benchmarks.peers.serving import Outcome, Prompt, serve


class Fake:
    def __init__(self, options: dict[str, Any]) -> None:
        print("what a library prints while it loads")
        self.version = options["version"]

    def run(self, prompts: list[Prompt], tokens: int) -> Outcome:
        if tokens == 13:
            raise RuntimeError("thirteen")
        outcome = Outcome(len(prompts))
        for _ in range(tokens):
            for job in range(len(prompts)):
                outcome.add(job, 1)
        return outcome.end()


if __name__ == "__main__":
    serve(Fake)
