"""The examples of README and docs, run as they stand there."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gllm
from tests.e2e.conftest import Start
from tests.servers import Server, binaries, require

ROOT = Path(__file__).resolve().parent.parent.parent


def blocks(page: str, language: str) -> list[str]:
    """The fenced code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def redis_commands(page: str) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("redis-cli")]


@pytest.fixture(params=require(dict(list(binaries().items())[:1])))
def served(request: pytest.FixtureRequest, tmp_path: Path, start: Start) -> Iterator[Server]:
    """A server of its own with a worker on the queue `default`, which the examples name."""
    server = Server(binaries()[request.param], tmp_path)
    server.start()
    try:
        start("--redis", server.url, "--queue", "default").wait_event("ready")
        yield server
    finally:
        server.stop(kill=True)


def shell(command: str, server: Server) -> str:
    local = command.replace("redis-cli", f"redis-cli -h 127.0.0.1 -p {server.port}", 1)
    done = subprocess.run(local, shell=True, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli here")
def test_redis_cli_examples_of_the_readme_work(served: Server) -> None:
    add, read = redis_commands("README.md")
    assert " XADD " in add
    assert " XREAD " in read
    shell(add, served)
    with gllm.SyncClient(served.url) as client:
        result = client.result("job1", timeout=60)
    assert result.finish_reason in ("length", "stop")
    assert '"type":"done"' in shell(read, served)


def test_python_example_of_the_readme_works(served: Server) -> None:
    (code,) = blocks("README.md", "python")
    assert "redis://localhost:6379/0" in code
    local = code.replace("redis://localhost:6379/0", served.url)
    done = subprocess.run([sys.executable, "-c", local], check=False, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_python_example_of_the_engine_page_works(tiny_model: Path) -> None:
    (code,) = blocks("docs/engine.md", "python")
    assert '"model.gguf"' in code
    local = code.replace('"model.gguf"', repr(str(tiny_model)))
    done = subprocess.run([sys.executable, "-c", local], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("length")
