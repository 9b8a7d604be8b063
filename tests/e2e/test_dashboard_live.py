"""A real Prometheus reads real workers with good and bad moments: every panel has something to show."""

import json
import runpy
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gllm
from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.e2e.conftest import Start
from tests.e2e.worker_process import WorkerProcess
from tests.servers import Server, binaries, first_kind
from worker.embedded import free_port

PICTURE = runpy.run_path(str(Path(__file__).parents[2] / "deploy" / "grafana" / "picture.py"))
GRAPHS = [panel for panel in json.loads(PICTURE["DASHBOARD"].read_text())["panels"] if panel["type"] != "row"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(binaries()[first_kind()], tmp_path)
    server.start()
    yield server
    server.stop(kill=True)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[list[WorkerProcess]], str]]:
    """Starts a Prometheus that reads workers each second; its URL."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian and Ubuntu: apt install prometheus)")
    running: list[subprocess.Popen[bytes]] = []

    def begin(workers: list[WorkerProcess]) -> str:
        url = f"http://127.0.0.1:{free_port()}"
        lines = [worker.wait_event("metrics_listening") for worker in workers]
        targets = [f"{line['host']}:{line['port']}" for line in lines]
        jobs = [{"job_name": "gllm", "static_configs": [{"targets": targets}]}]
        config = tmp_path / "prometheus.yml"
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
        command = [program, f"--config.file={config}", f"--web.listen-address={url.removeprefix('http://')}"]
        with (tmp_path / "prometheus.log").open("wb") as log:
            running.append(
                subprocess.Popen([*command, f"--storage.tsdb.path={tmp_path / 'data'}"], stdout=log, stderr=log)
            )
        wait(lambda: answers(f"{url}/-/ready"), "a ready Prometheus")
        return url

    yield begin
    for process in running:
        process.terminate()
        process.wait(20)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def wait(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def eventually_empty(url: str, seconds: float = 10.0) -> list[str]:
    """The panels without a line, once Prometheus has had time to read the last of it."""
    end = time.monotonic() + seconds
    while True:
        asked = PICTURE["Prometheus"](url, 2.0, 5.0)
        empty = [panel["title"] for panel in GRAPHS if not asked.lines(panel)]
        if not empty or time.monotonic() > end:
            return empty
        time.sleep(0.5)


def work(client: gllm.SyncClient, seconds: float) -> list[str]:
    """Submit jobs for a while, more than the workers can take at once; the ids."""
    jobs: list[str] = []
    end = time.monotonic() + seconds
    shared = "the same beginning for everybody, which is long enough for a block or two of the cache. "
    while time.monotonic() < end:
        for priority in gllm.keys.PRIORITIES:
            jobs.append(client.submit(prompt=f"{shared}{len(jobs)}", max_tokens=60, ignore_eos=True, priority=priority))
        time.sleep(0.05)
    return jobs


@pytest.mark.slow
def test_every_panel_has_something_to_show(
    server: Server, start: Start, queue_name: str, prometheus: Callable[[list[WorkerProcess]], str], tmp_path: Path
) -> None:
    flags = ("--redis", server.url, "--kv-blocks", "40", "--max-sequences", "6", "--lease", "1")
    first, second = start(*flags), start(*flags)
    url = prometheus([first, second])
    first.wait_event("ready")
    second.wait_event("ready")
    with gllm.SyncClient(server.url, queue_name) as client, connect_sync(server.url) as redis:
        jobs = work(client, 4.0)
        client.cancel(jobs[-1])
        first.end()  # SIGKILL
        redis.xadd(Keys(queue_name).jobs("normal", 0), {"id": "malformed", "body": "{}", "deadline": "soon"})
        jobs += work(client, 4.0)
        redis.client_pause(1500)  # longer than a renewal waits
    with gllm.SyncClient(server.url, queue_name) as client:
        for job in jobs:
            client.result(job, timeout=120)

    assert eventually_empty(url) == []
    picture = tmp_path / "dashboard.png"
    board: dict[str, Any] = json.loads(PICTURE["DASHBOARD"].read_text())
    PICTURE["draw"](board["panels"], PICTURE["Prometheus"](url, 2.0, 5.0), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
