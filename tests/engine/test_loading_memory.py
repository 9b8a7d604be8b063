"""Loading takes little more memory than the model: measured in processes that do nothing else.

Weight files are mapped, each tensor is moved once, into the dtype and the layout that it is served in, and the pages of
the file are given back. So at the peak there are the parameters moved so far and one matrix more, whatever the file's
dtype. What a process needs for any model (libraries, Python's objects, the kernels' buffers) is measured with a tiny
one and deducted.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from tests.engine.gguf_files import write_gguf

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1.15  # of the parameters as they are served
TINY, LARGE = (1, 64, 128, 256), (6, 1024, 3072, 8192)  # layers, hidden, intermediate, vocabulary
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc of Linux")


def shapes(layers: int, hidden: int, inner: int, vocabulary: int, *, tied: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, hidden), "output_norm": (hidden,)}
    for number in range(layers):
        block = {f"attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
        block |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        block |= {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        found |= {f"blk.{number}.{name}": shape for name, shape in block.items()}
    return found if tied else found | {"output": (vocabulary, hidden)}


def write_directory(path: Path, size: tuple[int, int, int, int], dtype: torch.dtype, *, tied: bool) -> Path:
    """A Llama of zeros, which weigh as much as other numbers."""
    from engine.gguf import BLOCK_NAMES, TOP_NAMES

    def hf_name(name: str) -> str:
        if name in TOP_NAMES:
            return f"{TOP_NAMES[name]}.weight"
        _, number, part = name.split(".")
        return f"model.layers.{number}.{BLOCK_NAMES[part]}.weight"

    path.mkdir()
    tensors = {hf_name(name): torch.zeros(shape, dtype=dtype) for name, shape in shapes(*size, tied=tied).items()}
    save_file(tensors, path / "model.safetensors")
    layers, hidden, inner, vocabulary = size
    config: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden}
    config |= {"intermediate_size": inner, "vocab_size": vocabulary, "num_attention_heads": hidden // 64}
    config |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_file(path: Path, size: tuple[int, int, int, int], kind: GGMLQuantizationType) -> Path:
    layers, hidden, inner, _ = size
    settings: dict[str, Any] = {"context_length": 64, "embedding_length": hidden, "block_count": layers}
    settings |= {"feed_forward_length": inner, "attention.head_count": hidden // 64}
    settings |= {"attention.layer_norm_rms_epsilon": 1e-5}
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes(*size, tied=True).items()}
    return write_gguf(path, {f"llama.{key}": value for key, value in settings.items()}, tensors, kind)


def peaks(dtype: str, models: list[Path]) -> list[tuple[int, int]]:
    """Of each model: bytes of its parameters as served, and what loading took at its worst."""
    command = [sys.executable, "-m", "tests.engine.loading_peak", dtype, "auto", *map(str, models)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    numbers = [line.split() for line in done.stdout.splitlines()]
    return [(int(weights), int(peak)) for weights, peak in numbers]


@pytest.mark.parametrize("served", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_peak_of_loading_is_little_more_than_the_model(tmp_path: Path, served: str) -> None:
    """In the file's own dtype and in another; with a head of its own and with one tied to the embedding; from GGUF."""
    models = [
        write_directory(tmp_path / "tiny", TINY, torch.bfloat16, tied=False),
        write_directory(tmp_path / "bfloat16", LARGE, torch.bfloat16, tied=False),
        write_directory(tmp_path / "float32", LARGE, torch.float32, tied=True),
        write_file(tmp_path / "q8.gguf", LARGE, GGMLQuantizationType.Q8_0),
    ]
    (_, always), *found = peaks(served, models)
    for model, (weights, peak) in zip(models[1:], found, strict=True):
        assert weights > 100_000_000
        assert (peak - always) / weights < LIMIT, f"{model.name} in {served}: {peak} - {always} of {weights}"
        assert (peak - always) / weights > 0.9, "nothing was measured"
