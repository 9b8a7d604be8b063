"""Start-up and end with the real command: signals as PID 1, Redis that comes late, no home, no GPU, a dead engine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

import gllm
from gllm.keys import Keys
from tests.e2e.conftest import Start
from tests.e2e.worker_process import WorkerProcess
from tests.engine import models
from tests.servers import Server, binaries
from worker.embedded import free_port

Spoil = Callable[[Path], str]

IDLE_EXIT_SECONDS = 5.0  # about one in practice; a shell that swallows SIGTERM takes the supervisor's whole timeout


def ask(url: str, queue: str, **job: Any) -> gllm.Result:
    """Submit one job and wait for its reply."""
    with gllm.SyncClient(url, queue) as client:
        return client.result(client.submit(**{"prompt": "abc", "max_tokens": 4, "ignore_eos": True} | job), timeout=60)


def seconds_to_exit(worker: WorkerProcess, pid: int) -> float:
    begin = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    assert worker.wait_exit(30) == 0, worker.said
    return time.monotonic() - begin


def can(*command: str) -> bool:
    """Whether this machine lets us run something in a namespace of its own."""
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run([*command, "true"], check=False, capture_output=True).returncode == 0


PID_1 = ("unshare", "--pid", "--fork", "--kill-child")
STRANGER = ("unshare", "--user", "--map-user=54321", "--map-group=54321")  # an id without a name, and no capabilities


# PK-H1: a shell is PID 1 and swallows SIGTERM


def test_idle_worker_leaves_soon_after_sigterm(start: Start, one_url: str, queue_name: str) -> None:
    worker = start()
    worker.wait_event("ready")
    assert ask(one_url, queue_name).usage.completion_tokens == 4
    assert seconds_to_exit(worker, worker.process.pid) < IDLE_EXIT_SECONDS
    assert worker.events[-1]["event"] == "stopped"


@pytest.mark.skipif(not can(*PID_1), reason="this user may not make a PID namespace")
def test_worker_as_pid_1_obeys_sigterm(start: Start) -> None:
    worker = start(wrap=PID_1)
    ready = worker.wait_event("ready")
    assert "-1-" in ready["worker"], "the worker is not PID 1 of its namespace"
    (pid, *_) = worker.descendants()
    assert seconds_to_exit(worker, pid) < IDLE_EXIT_SECONDS


@pytest.mark.skipif(not can(*PID_1), reason="this user may not make a PID namespace")
def test_process_1_hears_sigterm_before_it_has_imported_anything(start: Start) -> None:
    """The kernel drops those that come before Python runs; the first one after that ends it: nothing has begun."""
    worker = start(wrap=PID_1, command=(sys.executable, "-m", "worker"))
    end = time.monotonic() + 30
    while worker.process.poll() is None:
        assert time.monotonic() < end, worker.said
        for pid in worker.descendants():
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.001)
    assert worker.process.returncode == 0, worker.said
    assert worker.said == ""


def test_sigterm_while_loading_ends_the_worker_too(start: Start) -> None:
    worker = start()
    worker.wait_event("starting")
    assert seconds_to_exit(worker, worker.process.pid) < IDLE_EXIT_SECONDS
    assert worker.descendants() == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_torch_is_loaded_by_the_engines_process_only(start: Start) -> None:
    worker = start()
    worker.wait_event("ready")
    (engine, *_) = worker.descendants()
    assert "libtorch" in Path(f"/proc/{engine}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{worker.process.pid}/maps").read_text()


# PK-H2: Redis is not up yet, or still loading


class Loading:
    """A Redis that is still reading its data: it answers every command with LOADING."""

    def __init__(self, port: int) -> None:
        answer = (
            "import socketserver, sys\n"
            "class Handler(socketserver.BaseRequestHandler):\n"
            "    def handle(self):\n"
            "        while self.request.recv(65536):\n"
            "            self.request.sendall(b'-LOADING Redis is loading the dataset in memory\\r\\n' * 8)\n"
            "class Server(socketserver.ThreadingTCPServer):\n"
            "    allow_reuse_address, daemon_threads = True, True\n"
            "Server(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()\n"
        )
        self._process = subprocess.Popen([sys.executable, "-c", answer, str(port)])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(10)


@pytest.mark.parametrize("before", ["nothing", "loading"])
def test_worker_waits_for_redis_and_then_serves(start: Start, tmp_path: Path, queue_name: str, before: str) -> None:
    server = Server(next(iter(binaries().values())), tmp_path)
    loading = Loading(server.port) if before == "loading" else None
    try:
        worker = start("--redis", server.url)
        worker.wait_event("redis_waiting")
        assert worker.get("/livez")[0] == 200
        assert worker.get("/readyz")[0] == 503
        if loading is not None:
            loading.stop()
        server.start()
        worker.wait_event("ready")
        assert ask(server.url, queue_name).usage.completion_tokens == 4
        assert worker.get("/readyz")[0] == 200
    finally:
        if loading is not None:
            loading.stop()
        server.stop(kill=True)


# PK-H3: no home, an unknown user, a model that cannot be written to


@pytest.mark.skipif(not can(*STRANGER), reason="this user may not make a user namespace")
def test_unknown_user_without_a_home_serves_from_a_read_only_model(
    start: Start, tmp_path: Path, tiny_model: Path, one_url: str, queue_name: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    for path in (*model.iterdir(), model):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        worker = start("--model", str(model), environment={"PATH": os.environ["PATH"]}, wrap=STRANGER)
        worker.wait_event("ready")
        assert ask(one_url, queue_name).usage.completion_tokens == 4
    finally:
        model.chmod(0o755)


# PK-H4: a GPU was asked for, and the worker quietly runs on the CPU


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_refused_by_name(start: Start) -> None:
    worker = start("--device", "cuda")
    assert worker.wait_exit() not in (0, None)
    assert "cuda" in worker.events[-2]["message"] or "cuda" in worker.events[-1].get("message", "")
    assert "Traceback" not in worker.said


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU here")
def test_auto_says_in_log_and_metrics_that_it_took_the_cpu(start: Start) -> None:
    worker = start("--device", "auto")
    assert worker.wait_event("engine_ready")["device"] == "cpu"
    worker.wait_event("ready")
    assert 'device="cpu"' in worker.get("/metrics")[1]


# PK-H5: the engine has died; the process and its health port stay up, and jobs hang


def test_killed_engine_ends_the_worker_and_another_one_goes_on(start: Start, one_url: str, queue_name: str) -> None:
    worker = start()
    worker.wait_event("ready")
    with gllm.SyncClient(one_url, queue_name) as client:
        job = client.submit(prompt="abc", max_tokens=200, ignore_eos=True, temperature=0)
        replies = client.stream(job)
        next(reply for reply in replies if reply.ids)
        (engine, *_) = worker.descendants()
        os.kill(engine, signal.SIGKILL)
        assert worker.wait_exit(30) not in (0, None)
        assert "engine_died" in [line["event"] for line in worker.events]
        start().wait_event("ready")
        result = client.result(job, timeout=60)
    assert result.usage.completion_tokens == 200
    assert result.text == ask(one_url, queue_name, max_tokens=200, temperature=0).text


def test_engine_does_not_outlive_a_killed_worker(start: Start) -> None:
    worker = start()
    worker.wait_event("ready")
    engines = worker.descendants()
    assert engines
    worker.process.kill()
    worker.wait_exit(10)
    end = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in engines):
        assert time.monotonic() < end, "the engine's process outlives its worker"
        time.sleep(0.02)


# MX-H5: the metrics port is taken


def test_second_worker_on_a_taken_port_stops_before_it_claims(start: Start, one_url: str, queue_name: str) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        with gllm.SyncClient(one_url, queue_name) as client:
            job = client.submit(prompt="abc", max_tokens=4, ignore_eos=True)
            worker = start("--metrics-port", str(port))
            assert worker.wait_exit() not in (0, None)
            assert f"metrics port {port} on 127.0.0.1 is taken" in worker.said
            assert "--metrics-port" in worker.said
            assert "Traceback" not in worker.said
            start().wait_event("ready")
            assert client.result(job, timeout=60).usage.completion_tokens == 4


def test_keys_of_a_served_queue_expire_or_are_permanent(start: Start, one_url: str, keys: Keys) -> None:
    """The fixture `keys` looks at them afterwards."""
    worker = start("--queue", keys.queue, "--redis", one_url)
    worker.wait_event("ready")
    assert ask(one_url, keys.queue).usage.completion_tokens == 4
    assert seconds_to_exit(worker, worker.process.pid) < IDLE_EXIT_SECONDS


# What cannot work ends the worker with one clear line, before it joins the queue


def without_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return "model.safetensors"


def with_truncated_weights(model: Path) -> str:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return "model.safetensors"


def with_unknown_switch(model: Path) -> str:
    models.edit_config(model, attn_temperature_tuning=True)
    return "attn_temperature_tuning"


def without_tokenizer(model: Path) -> str:
    (model / "tokenizer.json").unlink()
    return "tokenizer"


@pytest.mark.parametrize("spoil", [without_weights, with_truncated_weights, with_unknown_switch, without_tokenizer])
def test_spoilt_model_is_refused_by_file_or_option(
    start: Start, tiny_model: Path, tmp_path: Path, redis_client: redis.Redis, queue_name: str, spoil: Spoil
) -> None:
    model = tmp_path / "spoilt"
    shutil.copytree(tiny_model, model)
    named = spoil(model)
    worker = start("--model", str(model))
    assert worker.wait_exit() not in (0, None)
    errors = [line for line in worker.events if line["level"] in ("error", "critical")]
    assert len(errors) == 1, worker.said
    assert named in errors[0]["message"]
    assert "Traceback" not in worker.said
    assert redis_client.zcard(Keys(queue_name).workers) == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--redis", "http://localhost"], "--redis"),
        (["--metrics-port", "70000"], "--metrics-port"),
        (["--kv-memory", "much"], "--kv-memory"),
        (["--queue", "a b"], "--queue"),
        (["--block-size", "0"], "--block-size"),
    ],
)
def test_impossible_setting_is_refused_by_name(start: Start, flags: list[str], named: str) -> None:
    worker = start(*flags)
    assert worker.wait_exit() not in (0, None)
    assert named in worker.said
    assert "Traceback" not in worker.said
