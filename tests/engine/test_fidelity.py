"""The proof, on real weights: SmolLM2 here and in transformers, each reading the same GGUF with its own reader."""

from pathlib import Path

import pytest
import torch

from benchmarks.fidelity import LOGIT_LIMIT, PASSAGE_TOKENS, Ours, Theirs, difference, passage, prompts
from worker.models import resolve_model
from worker.tokenizer import Tokenizer, load_tokenizer

FEW, FEW_TOKENS = 10, 8
pytestmark = pytest.mark.timeout(600)  # 1,024 tokens in float32 on each side, on a machine that may be busy


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def theirs(path: Path) -> Theirs:
    return Theirs(path)


@pytest.fixture(scope="module")
def ours(path: Path) -> Ours:
    return Ours(path, torch.get_num_threads())


def test_perplexity_and_every_logit_of_a_passage_equal_transformers(ours, theirs, tokenizer):
    ids = tokenizer.encode(passage())
    assert ids == theirs.encode(passage())
    mine, right = ours.score(ids[:PASSAGE_TOKENS]), theirs.score(ids[:PASSAGE_TOKENS])
    assert len(mine.logprobs) == len(mine.logits) == PASSAGE_TOKENS - 1
    assert difference(mine, right) < LOGIT_LIMIT
    assert torch.allclose(mine.logprobs, right.logprobs, atol=1e-3)
    assert mine.perplexity == pytest.approx(right.perplexity, rel=1e-5)
    assert 18 < mine.perplexity < 20, "another model, or another passage"


def test_greedy_replies_to_a_few_prompts_equal_transformers(ours, theirs, tokenizer):
    """Every tenth of the hundred: facts, stories, code, numbers, questions, letters, other scripts, control tokens."""
    asked = [tokenizer.encode(prompt) for prompt in prompts()[:: 100 // FEW]]
    assert len(asked) == FEW
    for prompt, reply in zip(asked, ours.replies(asked, FEW_TOKENS), strict=True):
        assert theirs.agrees(prompt, reply)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_greedy_replies_equal_those_that_transformers_generates(ours, theirs, tokenizer):
    texts = prompts()
    assert len(set(texts)) == 100
    asked = [tokenizer.encode(text) for text in texts]
    assert asked == [theirs.encode(text) for text in texts]
    for prompt, reply in zip(asked, ours.replies(asked, 24), strict=True):
        ids = torch.tensor([prompt])
        generated = theirs.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert generated[0, len(prompt) :].tolist() == reply
