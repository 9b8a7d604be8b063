"""The demo model, with its real weights: read from GGUF as from safetensors, equal to transformers in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from engine import Engine, FinishReason, SamplingParams
from engine.errors import ModelError
from engine.gguf import GgufSource
from engine.gguf_head import read_metadata
from tests.engine import models
from tests.engine.driving import poison, record_logits, request, run, same_bits
from worker.tokenizer import load_tokenizer

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    if n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "2 + 2 =",
]


@pytest.fixture(scope="module")
def smollm2() -> str:
    return models.smollm2()


@pytest.fixture(scope="module")
def source(smollm2: str) -> GgufSource:
    return GgufSource(Path(smollm2))


@pytest.fixture(scope="module")
def exported(source: GgufSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a Hugging Face checkpoint in float32."""
    directory = tmp_path_factory.mktemp("smollm2")
    config = source.config
    LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
        eos_token_id=config.eos_token_ids,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    ).save_pretrained(directory)
    save_file(
        {name: source.read(name).contiguous() for name in source.names()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


@pytest.fixture(scope="module")
def oracle(exported: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()


@pytest.fixture
def engine(make_engine, smollm2: str) -> Engine:
    return make_engine(model=smollm2, block_size=16, kv_blocks=64, max_sequences=8)


def encode(smollm2: str) -> list[list[int]]:
    tokenizer = load_tokenizer(Path(smollm2))
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def test_the_files_names_shapes_and_end_ids(source):
    config = source.config
    assert (config.family, config.layers, config.heads, config.kv_heads, config.head_dim) == ("llama", 30, 9, 3, 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.max_positions, config.rope.kind, config.rope.theta, config.tied) == (8192, "default", 1e5, True)
    assert config.eos_token_ids == [2]
    assert len(source.names()) == 272 == 2 + 30 * 9
    shapes = {
        "model.embed_tokens.weight": (49152, 576),
        "model.layers.29.self_attn.k_proj.weight": (192, 576),
        "model.layers.0.mlp.down_proj.weight": (576, 1536),
        "model.norm.weight": (576,),
    }
    for name, shape in shapes.items():
        assert source.read(name).shape == shape


def test_paris_is_the_capital_of_france(engine, smollm2):
    tokenizer = load_tokenizer(Path(smollm2))
    asked = request("x", tokenizer.encode(PROMPTS[0]), SamplingParams(max_tokens=5, temperature=0.0))
    assert tokenizer.decode(run(engine, [asked])["x"].tokens).startswith(" Paris")


def test_a_chat_reply_ends_at_the_end_of_turn(engine, smollm2):
    (tokens,) = (ids for ids, prompt in zip(encode(smollm2), PROMPTS, strict=True) if "<|im_start|>" in prompt)
    reply = run(engine, [request("x", tokens, SamplingParams(max_tokens=200, temperature=0.0))])["x"]
    assert (reply.finish_reason, reply.tokens[-1]) == (FinishReason.STOP, 2)


@pytest.mark.timeout(300)
def test_logits_and_greedy_tokens_equal_transformers_from_gguf_and_from_safetensors(
    engine, smollm2, exported, oracle, make_engine
):
    prompts = encode(smollm2)
    asked = [
        request(f"r{index}", tokens, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        for index, tokens in enumerate(prompts)
    ]
    poison(engine)
    logits = record_logits(engine)
    replies = run(engine, asked)
    for index, prompt in enumerate(prompts):
        tokens = prompt + replies[f"r{index}"].tokens
        with torch.no_grad():
            expected = oracle(torch.tensor([tokens])).logits[0]
        for position in range(len(prompt), len(tokens)):
            ours, theirs = logits[f"r{index}", position], expected[position - 1]
            assert (ours - theirs).norm() / theirs.norm() < 1e-4
            assert tokens[position] == int(theirs.argmax())
    other = make_engine(model=str(exported), block_size=16, kv_blocks=64, max_sequences=8)
    assert other.eos_token_ids == engine.eos_token_ids
    again = record_logits(other)
    run(other, asked)
    for index in range(len(prompts)):
        assert same_bits(logits, again, f"r{index}") == 12


def test_a_truncated_demo_model_is_refused_by_name(smollm2, tmp_path, make_engine):
    path = tmp_path / "cut.gguf"
    with Path(smollm2).open("rb") as whole:
        path.write_bytes(whole.read(40_000_000))
    with pytest.raises(ModelError, match=str(path)):
        make_engine(model=str(path))
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(ModelError, match=str(path)):
        make_engine(model=str(path))


def test_the_vocabulary_of_the_metadata_fits_the_embedding(smollm2, source):
    assert len(read_metadata(Path(smollm2))["tokenizer.ggml.tokens"]) == source.config.vocab_size
