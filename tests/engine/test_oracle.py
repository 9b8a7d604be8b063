"""Logits and greedy tokens against Hugging Face transformers on the same random checkpoints."""

import pytest
import torch

from engine import SamplingParams
from tests.engine.driving import poison, record_logits, request, run

LENGTHS = (1, 3, 4, 5, 8, 17, 40)
SHAPES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"hidden_size": 24, "head_dim": 8, "num_attention_heads": 4}),
    "llama-nine-heads": ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(3, 160, (length,), generator=generator).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_tokens_equal_transformers(shape, checkpoints, make_engine):
    kind, changes = SHAPES[shape]
    directory, oracle = checkpoints(kind, **changes)
    engine = make_engine(model=str(directory))
    poison(engine)
    logits = record_logits(engine)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    replies = run(engine, [request(f"r{length}", prompt(length), sampling) for length in LENGTHS])
    for length in LENGTHS:
        tokens = prompt(length) + replies[f"r{length}"].tokens
        with torch.no_grad():
            expected = oracle(torch.tensor([tokens])).logits[0]
        for position in range(length, len(tokens)):
            ours = logits[f"r{length}", position]
            torch.testing.assert_close(ours, expected[position - 1], rtol=1e-4, atol=1e-4)
            assert tokens[position] == int(expected[position - 1].argmax())


@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_prompt_logprobs_equal_transformers(shape, checkpoints, make_engine):
    kind, changes = SHAPES[shape]
    directory, oracle = checkpoints(kind, **changes)
    engine = make_engine(model=str(directory), max_step_tokens=7)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3, logprobs=2, ignore_eos=True)
    reply = run(engine, [request("scored", prompt(20), sampling)])["scored"]
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt(20) + reply.tokens])).logits[0].log_softmax(-1)
    assert reply.prompt_logprobs is not None
    assert reply.prompt_logprobs[0] is None
    assert len(reply.prompt_logprobs) == 20
    for position, row in enumerate([*reply.prompt_logprobs[1:], *reply.logprobs], start=1):
        token, logprob, top = row
        assert token == (prompt(20) + reply.tokens)[position]
        assert logprob == pytest.approx(float(expected[position - 1, token]), abs=1e-4)
        best = expected[position - 1].topk(len(top))
        assert [pair[0] for pair in top] == best.indices.tolist()
        assert [pair[1] for pair in top] == pytest.approx(best.values.tolist(), abs=1e-4)
