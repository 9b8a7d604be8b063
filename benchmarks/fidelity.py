"""Do we compute what the authors would? SmolLM2 here and in transformers, both from the same GGUF, in float32.

    python -m benchmarks.fidelity                # perplexity, logits, and the replies to 100 prompts
    python -m benchmarks.fidelity --tokens 8     # shorter replies
    python -m benchmarks.fidelity --json -

Each side reads the file by itself: transformers through its own GGUF reader, for the weights and for the tokenizer. The
passage is scored here as a job scores its prompt (`prompt_logprobs`), in pieces, over the paged cache. A greedy reply
is transformers' own when each of its tokens has the greatest of transformers' logits after the tokens before it.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from benchmarks import environment
from benchmarks.figure import Figure
from benchmarks.sections import conclude
from engine import Delta, Engine, EngineConfig, Request, SamplingParams
from worker.models import resolve_model
from worker.tokenizer import load_tokenizer

TEXTS = Path(__file__).parent / "texts"
PASSAGE_TOKENS, REPLY_TOKENS = 1024, 24
LOGIT_LIMIT = 1e-4  # asked of every position: |ours - theirs| / |theirs|
TITLES = {
    "passage": "One passage, scored: the opening of Pride and Prejudice (1813)",
    "replies": "Greedy replies to short prompts",
}


@dataclass(frozen=True)
class Score:
    """Of a passage of T tokens: logits [T - 1, vocabulary] and the log-probability of each token but the first."""

    logits: Tensor
    logprobs: Tensor

    @property
    def perplexity(self) -> float:
        return float(torch.exp(-self.logprobs.double().mean()))


class Ours:
    """Our engine on a GGUF file, in float32."""

    def __init__(self, path: Path, threads: int) -> None:
        settings = {"device": "cpu", "dtype": "float32", "kv_blocks": 512, "max_step_tokens": 512, "threads": threads}
        self.engine = Engine(EngineConfig(model=str(path), **settings))

    def score(self, ids: list[int]) -> Score:
        """As a job does that asks for its prompt's log-probabilities and no token."""
        runner, seen = self.engine.runner, list[Tensor]()
        compute = runner.logits

        def kept(hidden: Tensor) -> Tensor:
            seen.append(compute(hidden).clone())
            return seen[-1]

        runner.logits = kept
        self.engine.add(Request(id="passage", tokens=ids, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0)))
        rows = [row for delta in self._run() for row in delta.prompt_logprobs or []]
        runner.logits = compute
        return Score(torch.cat(seen)[: len(ids) - 1], torch.tensor([row[1] for row in rows if row]))

    def replies(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy, all in one batch."""
        greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        found: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        for number, ids in enumerate(prompts):
            self.engine.add(Request(id=str(number), tokens=ids, sampling=greedy))
        for delta in self._run():
            found[delta.id] += delta.tokens
        return list(found.values())

    def _run(self) -> Iterator[Delta]:
        while self.engine.busy:
            yield from self.engine.step()


class Theirs:
    """transformers on the same file: its own reader, its own tokenizer, its own maths."""

    def __init__(self, path: Path) -> None:
        logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(config)
        state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shapes)["tensors"]
        kind = type(shapes)
        self.model: PreTrainedModel = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def logits(self, ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0]

    def score(self, ids: list[int]) -> Score:
        logits = self.logits(ids)[:-1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return Score(logits, chosen)

    def agrees(self, prompt: list[int], reply: list[int]) -> bool:
        """Whether greedy generation gives this reply: each token is the best after the prompt and those before it."""
        best = self.logits(prompt + reply)[len(prompt) - 1 : -1].argmax(-1)
        return best.tolist() == reply


def passage() -> str:
    return (TEXTS / "austen.txt").read_text(encoding="utf-8")


def prompts() -> list[str]:
    return (TEXTS / "prompts.txt").read_text(encoding="utf-8").splitlines()


def difference(ours: Score, theirs: Score) -> float:
    """The largest relative difference of logits, over the positions."""
    return float(((ours.logits - theirs.logits).norm(dim=-1) / theirs.logits.norm(dim=-1)).max())


def scored(ours: Ours, theirs: Theirs, ids: list[int]) -> list[Figure]:
    mine, right = ours.score(ids), theirs.score(ids)
    return [
        Figure("tokens", len(ids), ""),
        Figure("perplexity, gllm", mine.perplexity, ""),
        Figure("perplexity, transformers", right.perplexity, ""),
        Figure("their relative difference", abs(mine.perplexity / right.perplexity - 1), "", 1e-5),
        Figure("largest relative difference of logits at a position", difference(mine, right), "", LOGIT_LIMIT),
    ]


def replied(ours: Ours, theirs: Theirs, asked: list[list[int]], tokens: int) -> list[Figure]:
    replies = ours.replies(asked, tokens)
    same = sum(theirs.agrees(prompt, reply) for prompt, reply in zip(asked, replies, strict=True))
    return [
        Figure("prompts", len(asked), ""),
        Figure("tokens of each reply", tokens, ""),
        Figure("replies equal to transformers'", same, "", len(asked), at_least=True),
    ]


def measure(model: str, tokens: int, threads: int) -> dict[str, list[Figure]]:
    path = resolve_model(model)
    torch.set_num_threads(threads)
    tokenizer, theirs, ours = load_tokenizer(path), Theirs(path), Ours(path, threads)
    texts = [passage(), *prompts()]
    (whole, *asked), reference = [tokenizer.encode(text) for text in texts], [theirs.encode(text) for text in texts]
    same = sum(a == b for a, b in zip([whole, *asked], reference, strict=True))
    ids = Figure("texts with the same token ids", same, "", len(texts), at_least=True)
    return {
        "passage": [ids, *scored(ours, theirs, whole[:PASSAGE_TOKENS])],
        "replies": replied(ours, theirs, asked, tokens),
    }


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=REPLY_TOKENS, help="of each reply")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", help="write everything to this file; - prints it")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a mark is not met")
    options = parser.parse_args()
    where = environment.describe(options.threads)
    conclude(options, TITLES, where, measure(options.model, options.tokens, options.threads))


if __name__ == "__main__":
    main()
