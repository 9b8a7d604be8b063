"""The sampling that a model's authors advise, for workers that are started with --model-defaults."""

import json
from pathlib import Path
from typing import Any

from gllm.protocol import InvalidJob
from gllm.validate import job_from
from worker.models import ModelError

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: Path) -> dict[str, float]:
    """The sampling fields of generation_config.json, by the names of the protocol; `do_sample` false means greedy.

    Raises ModelError when there is no such file, or when it holds what no job could.
    """
    path = model / "generation_config.json"
    if not path.is_file():
        raise ModelError(f"model_defaults: {path} is not there: the model has no defaults to be started with")
    config = _read(path)
    defaults = {name: config[name] for name in FIELDS if config.get(name) is not None}
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    try:
        job_from(prompt="x", **defaults)
    except InvalidJob as error:
        raise ModelError(f"{path}: {error}") from None
    return defaults


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: an object expected, got {type(config).__name__}")
    return config
