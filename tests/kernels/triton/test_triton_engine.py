"""A whole engine on the Triton kernels, through the interpreter: the tokens that plain torch gives."""

import pytest
import torch
from msgspec.structs import replace

from engine import Engine, EngineConfig, SamplingParams
from kernels import Heads, TorchBackend
from kernels.triton.backend import TritonBackend
from kernels.triton.layers import TritonLayers
from kernels.triton.state import TritonResident
from tests.engine.driving import poison, record_logits, request, run
from tests.engine.models import save


@pytest.mark.parametrize(("kind", "changes"), [("qwen3", {}), ("gemma2", {"sliding_window": 5})])
def test_an_engine_on_triton_kernels_gives_the_tokens_of_torch(tmp_path, monkeypatch, kind, changes):
    """Chunks, decodes and mixed steps, on a pool full of NaN; q/k norms, or windows and soft-caps."""
    save(tmp_path, kind, head_dim=16, num_hidden_layers=2, **changes)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", kernels="torch", block_size=4,
                          kv_blocks=40, max_step_tokens=8, threads=1)  # fmt: skip
    requests = [request("a", range(3, 16)), request("b", [9]), request("c", range(30, 37))]
    expected = run(Engine(config), requests)
    backend = TritonBackend(deterministic=True)
    monkeypatch.setattr("engine.runner.select", lambda **asked: backend)
    engine = Engine(config)
    poison(engine)
    replies = run(engine, requests)
    assert {name: reply.tokens for name, reply in replies.items()} == {
        name: reply.tokens for name, reply in expected.items()
    }
    announced = {variant[0] for variant in backend._announced}
    assert announced >= {"decode_splits", "prefill", "rms_norm", "gate"}
    assert (announced >= {"norm_rope_store", "add_rms_norm"}) == (kind != "gemma2")  # it has norms after, too


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {}),
        ("smollm3", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
        ("mistral", {"sliding_window": 5}),
    ],
)
def test_layers_in_few_launches_are_those_of_torch(tmp_path, monkeypatch, kind, changes):
    """Logits of a prompt in pieces and of decodes: biases, head norms, layers without rope, windows."""
    save(tmp_path, kind, head_dim=16, num_hidden_layers=2, **changes)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", kernels="torch", block_size=4,
                          kv_blocks=20, max_step_tokens=9, threads=1)  # fmt: skip
    found = []
    for backend in (TorchBackend(deterministic=True), TritonBackend(deterministic=True)):
        monkeypatch.setattr("engine.runner.select", lambda backend=backend, **asked: backend)
        engine = Engine(config)
        poison(engine)
        assert isinstance(engine.runner.model._fused, TritonLayers) == isinstance(backend, TritonBackend)
        logits = record_logits(engine)
        run(engine, [request("a", range(3, 16), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))])
        found.append(logits)
    assert len(found[0]) == 3
    for key, row in found[0].items():
        torch.testing.assert_close(found[1][key], row, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "changes"), [("qwen3", {}), ("gemma2", {"sliding_window": 5})])
def test_steps_that_triton_prepares_give_the_tokens_of_torch(tmp_path, monkeypatch, kind, changes):
    """State, steps, attention of batches that only the device knows, and the lottery; two steps in flight."""
    save(tmp_path, kind, head_dim=16, num_hidden_layers=1, **changes)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", kernels="torch", block_size=4,
                          kv_blocks=40, max_sequences=3, max_step_tokens=8, threads=1, overlap=True)  # fmt: skip
    drawn = SamplingParams(max_tokens=5, temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, seed=4, ignore_eos=True)
    penalised = SamplingParams(max_tokens=3, temperature=0.7, repetition_penalty=1.3, ignore_eos=True)
    requests = [request("a", range(3, 16), drawn), request("b", [9], penalised), request("c", range(30, 37))]
    expected = run(Engine(config), requests)
    backend = TritonBackend(deterministic=True)
    monkeypatch.setattr("engine.runner.select", lambda **asked: backend)
    engine = Engine(replace(config, graphs=True))
    poison(engine)
    assert isinstance(engine.runner.stepper._kept.resident, TritonResident)
    assert run(engine, requests) == expected


def test_heads_that_no_kernel_serves_are_prepared_by_the_host():
    """Plain torch attends for them, which has to know lengths: that cannot be captured."""
    backend = TritonBackend(deterministic=False)
    assert backend.resident(torch.device("cuda"), Heads(2, 16), 256) is not None
    assert backend.resident(torch.device("cuda"), Heads(2, 17), 64) is None
    assert backend.resident(torch.device("cuda"), Heads(2, 4), 288) is None
