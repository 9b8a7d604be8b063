"""Files with wrong bytes, thousands of them (seeded): one clear error that names the file, or a model. Nothing else.

No other kind of exception, no hang, no huge allocation: a length or a size that is wrong costs nothing.
"""

import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.errors import ModelError
from engine.model import Decoder
from engine.weights import Loader, open_checkpoint
from kernels import TorchBackend
from tests.engine import models
from tests.engine.checkpoint_files import INDEX, WEIGHTS, shard
from tests.engine.gguf_files import settings_of, tensors_of, write_gguf
from tests.worker import text_fixtures as fixtures
from worker.tokenizer import load_tokenizer

ROUNDS = int(os.environ.get("DAMAGE_ROUNDS", "60"))  # for each file; more of it by hand
SECONDS, MEGABYTES = 5.0, 300  # a whole load takes 20 ms and next to nothing
DIGITS = b"0123456789"


def damage(whole: bytes, rng: random.Random, within: int) -> bytes:
    """One to three faults in the first `within` bytes: flipped, cut out, put in, repeated, other digits, or the end."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(within, len(data)) or 1)
        size = rng.choice((1, 1, 1, 2, 8, 40))
        kind = rng.randrange(7)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[at : at + size]
        elif kind == 2:
            data[at:at] = rng.randbytes(size)
        elif kind == 3:
            data[at:at] = data[at : at + size]
        elif kind == 4:
            data[at : at + size] = b"\xff" * size
        elif kind == 5:
            places = [place for place in range(min(within, len(data))) if data[place] in DIGITS]
            if places:
                place = rng.choice(places)
                data[place : place + 1] = bytes(rng.choices(DIGITS, k=rng.choice((1, 2, 12))))
        else:
            del data[at:]
    return bytes(data)


def load(path: Path) -> None:
    """All that a worker reads of a model: weights into a decoder, and the tokenizer."""
    with open_checkpoint(str(path)) as (config, source, _), torch.inference_mode():
        loader = Loader(source, torch.float32, torch.device("cpu"))
        Decoder(config, loader, TorchBackend(deterministic=False), config.position_limit, 2)
        loader.close()
    load_tokenizer(path)


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def refusal(path: Path) -> str | None:
    """What the ModelError says, or None when it loads. Any other exception is the test's end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tied head that differs, numbers that overflow
        try:
            load(path)
        except ModelError as error:
            return str(error)
    return None


def damaged_loads(path: Path, file: Path, rng: random.Random, within: int = 1 << 20) -> int:
    """How many of the damaged files were refused."""
    whole, refused = file.read_bytes(), 0
    load(path)
    before = peak_bytes()
    for number in range(ROUNDS):
        file.write_bytes(damage(whole, rng, within))
        began = time.process_time()
        message = refusal(path)
        assert message is None or str(path.parent) in message, (number, message)
        assert time.process_time() - began < SECONDS, (number, "took long")
        refused += message is not None
    assert peak_bytes() - before < MEGABYTES << 20
    return refused


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    models.save(path, "llama", num_hidden_layers=1, max_position_embeddings=64)
    backend = fixtures.byte_level_backend(["Hello", " world"])
    return fixtures.save(path, backend, eos_token="<|im_end|>", chat_template=fixtures.CHATML)


def sharded(directory: Path) -> Path:
    shard(directory)
    return directory / INDEX


FILES: dict[str, Callable[[Path], Path]] = {
    "config.json": lambda directory: directory / "config.json",
    "generation_config.json": lambda directory: directory / "generation_config.json",
    "index": sharded,
    "tokenizer.json": lambda directory: directory / "tokenizer.json",
    "tokenizer_config.json": lambda directory: directory / "tokenizer_config.json",
}


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_json_file_is_refused_by_name_or_loaded(directory, rng, file):
    assert damaged_loads(directory, FILES[file](directory), rng) > ROUNDS / 5


def test_a_damaged_head_of_safetensors_is_refused_by_name_or_loaded(directory, rng):
    file = directory / WEIGHTS
    size = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert damaged_loads(directory, file, rng, size) > ROUNDS / 2


def test_a_damaged_head_of_gguf_is_refused_by_name_or_loaded(tmp_path, rng):
    model = models.build("llama", num_hidden_layers=1, max_position_embeddings=64)
    fields = fixtures.byte_level_fields()
    settings = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    settings |= {"tokenizer.ggml.model": "gpt2", "tokenizer.chat_template": fixtures.CHATML}
    (tmp_path / "model").mkdir()
    path = write_gguf(tmp_path / "model" / "m.gguf", settings_of(model) | settings, tensors_of(model))
    size = path.stat().st_size - sum(tensor.nbytes for tensor in tensors_of(model).values())
    assert damaged_loads(path, path, rng, size) > ROUNDS / 4
