"""The bench of the peers: the pipe, the points, the marks. The peers themselves are not installed here."""

from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cpu_peers import POINTS, QUICK, marks, run_rounds, table
from benchmarks.peers import engines
from benchmarks.peers.checkpoints import write_gguf
from benchmarks.peers.process import Peer, PeerError, PeerProcess
from engine.weights import open_checkpoint

FAKE = Peer(name="fake", module="tests.fake_peer", environment=None, options={"version": "7"})


def test_peer_speaks_through_the_pipe_whatever_its_libraries_print() -> None:
    with PeerProcess(FAKE) as peer:
        run = peer.run([[1, 2], [3, 4]], 5)

        assert (peer.version, run.produced) == ("7", [5, 5])
        assert 0 < max(run.first) <= run.total
        assert peer.start_seconds > 0
        assert peer.peak_bytes > 1_000_000


def test_peer_that_breaks_says_why() -> None:
    with PeerProcess(FAKE) as peer, pytest.raises(PeerError, match="thirteen"):
        peer.run([[1]], 13)


def test_every_point_of_a_peer_is_measured() -> None:
    versions, medians = run_rounds([FAKE], QUICK, rounds=2, repeats=1)

    assert set(medians["fake"]) == set(POINTS)
    assert all(value > 0 for value in medians["fake"].values())
    assert table(medians, versions).splitlines()[2].startswith("| fake | 7 |")


def test_peer_that_cannot_start_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Peer(name="broken", module="tests.fake_peer", environment=None, options={})

    _, medians = run_rounds([broken, FAKE], QUICK, rounds=1, repeats=1)

    assert list(medians) == ["fake"]
    assert "broken failed: status 1" in capsys.readouterr().err


def test_marks_compare_with_the_best_rival_and_less_is_more_for_seconds() -> None:
    ours = dict.fromkeys(POINTS, 12.0)
    medians = {"gllm": ours, "vllm": {**ours, "decode 1": 6.0, "shared": 36.0}, "openvino": {**ours, "decode 1": 8.0}}

    found = {figure.name: figure.value for figure in marks(medians)}

    assert found["decode at batch 1, the best bf16 peer"] == 1.5
    assert found["16 jobs that share a prefix, the best bf16 peer"] == 1.0
    assert not any("llama.cpp" in name for name in found), "a mark against an engine that did not run"


def test_engines_that_are_not_installed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.peers.process.PEERS", tmp_path)

    found = engines.engines(tmp_path, tmp_path, 1, ["gllm", "vllm", "gllm int8"])

    assert [peer.name for peer in found] == ["gllm", "gllm int8"]
    assert found[1].options["quantize"] == "int8"
    assert "vllm is left out" in capsys.readouterr().err
    with pytest.raises(ValueError, match="nobody"):
        engines.engines(tmp_path, tmp_path, 1, ["nobody"])


@pytest.mark.parametrize("quantisation", ["bf16", "q8_0"])
def test_gguf_file_for_a_peer_is_the_same_model(tmp_path: Path, quantisation: str) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")

    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", quantisation)

    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types == {quantisation.upper(), "F32"}
    with open_checkpoint(str(path)) as (_, source, _):
        for name, parameter in model.named_parameters():
            error = (source.read(name).float() - parameter.float()).abs().max()
            assert error <= (0.0 if quantisation == "bf16" else 0.02 * parameter.abs().max()), name
