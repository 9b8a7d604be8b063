"""A worker that is started with its model's own sampling defaults."""

import json
import shutil
from pathlib import Path

import gllm
from tests.e2e.conftest import Start


def test_job_without_a_temperature_is_greedy_where_the_model_is(
    start: Start, tiny_model: Path, tmp_path: Path, one_url: str, queue_name: str
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.7}))
    worker = start("--model", str(model), "--model-defaults")
    worker.wait_event("ready")

    with gllm.SyncClient(one_url, queue=queue_name) as client:
        unsaid, greedy, hot = (
            client.result(client.submit(prompt="abc", max_tokens=12, **fields), timeout=60).ids
            for fields in ({}, {"temperature": 0}, {"temperature": 5.0})
        )

    assert unsaid == greedy
    assert hot != greedy
