from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine import Engine, EngineConfig
from tests.engine import models
from tests.engine.checkpoint_files import copy_checkpoint
from tests.engine.driving import poison

Checkpoints = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """checkpoints(kind, **config) -> directory and HF model; made once per session."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def get(kind: str = "llama", **changes: Any) -> tuple[Path, PreTrainedModel]:
        key = repr((kind, sorted(changes.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(kind)
            made[key] = directory, models.save(directory, kind, **changes)
        return made[key]

    return get


@pytest.fixture
def llama(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A tiny Llama's directory, to be damaged."""
    return copy_checkpoint(checkpoints, tmp_path / "llama", "llama")


@pytest.fixture
def make_engine(checkpoints: Checkpoints) -> Callable[..., Engine]:
    """make_engine(kind=..., **EngineConfig): an engine on a tiny checkpoint, in float32 unless told otherwise.

    Its whole KV memory is NaN, so that whatever is read before it was written shows in every test.
    """

    def make(kind: str = "llama", model: str | None = None, **settings: Any) -> Engine:
        path = model or str(checkpoints(kind)[0])
        defaults: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "block_size": 4,
            "kv_blocks": 256,
            "threads": 1,
        }
        engine = Engine(EngineConfig(model=path, **defaults | settings))
        poison(engine)
        return engine

    return make


@pytest.fixture
def make_resident(make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """The same, but its steps are prepared on the device, by works that a graph could hold."""

    def made(**settings: Any) -> Engine:
        return make_engine(**{"kernels": "torch", "graphs": True} | settings)

    return made
