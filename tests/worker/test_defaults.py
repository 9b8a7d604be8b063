"""A model's own sampling defaults: read on request, overruled by a job, and part of what a queue's workers share."""

import json
from pathlib import Path

import msgspec
import pytest

from gllm.validate import decode_job
from worker.defaults import sampling_defaults
from worker.models import ModelError
from worker.startup import model_digest

LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2], "max_length": 4096}


def directory(path: Path, config: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


def test_sampling_fields_of_a_model_are_its_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(directory(tmp_path, LLAMA)) == {"temperature": 0.6, "top_p": 0.9}


def test_model_that_does_not_sample_is_greedy_by_default(tmp_path: Path) -> None:
    config = {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": None}
    assert sampling_defaults(directory(tmp_path, config)) == {"temperature": 0.0, "top_k": 20}


@pytest.mark.parametrize(
    ("config", "named"),
    [({"top_p": 0}, "top_p"), ({"temperature": "hot"}, "temperature"), ({"top_k": 1.5}, "top_k"), ([], "object")],
)
def test_default_that_no_job_could_have_is_refused_by_file_and_name(tmp_path: Path, config: object, named: str) -> None:
    with pytest.raises(ModelError, match=f"generation_config.json: .*{named}"):
        sampling_defaults(directory(tmp_path, config))


def test_model_without_defaults_cannot_be_started_with_them(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json is not there"):
        sampling_defaults(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
def test_job_overrules_the_model_field_by_field(encode: type) -> None:
    job = decode_job(encode({"prompt": "a", "temperature": 1.0, "top_k": 0}), {"temperature": 0.6, "top_p": 0.9})
    assert (job.temperature, job.top_k, job.top_p) == (1.0, 0, 0.9)
    assert decode_job(encode({"prompt": "a"})).top_p == 1.0


def test_workers_with_other_defaults_serve_another_queue(tmp_path: Path) -> None:
    """A job must not change its replies with the worker that takes it over."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    plain, warm, hot = (model_digest(file, "t", defaults) for defaults in ({}, {"top_p": 0.9}, {"top_p": 0.95}))
    assert len({plain, warm, hot}) == 3
    assert plain == model_digest(file, "t")
