"""compose.yaml and compose.gpu.yaml: what they promise, as far as that shows without a Docker engine."""

import http.server
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gllm.connection import connect_sync
from tests.deploy.files import DEPLOY, PASSWORD, ROOT, VARIABLES, compose, documents, seconds
from tests.servers import Server
from worker.bridge import STOP_SECONDS
from worker.config import Settings, resolve
from worker.running import LAST_WORDS_SECONDS

# The slowest of ten starts from the image's files, most of them not in memory, on two busy cores: /readyz after 6.8 s.
COLD_LOAD_SECONDS = 7
FILES = ("compose.yaml", "compose.gpu.yaml")
ENVIRONMENT = {"REDIS_PASSWORD": PASSWORD, "MODEL": "/srv/model"}


@cache
def services(name: str = "compose.yaml", **environment: str) -> dict[str, Any]:
    return compose(name, ENVIRONMENT | environment)["services"]


def settings_of(environment: dict[str, str]) -> Settings:
    return resolve({}, environment).settings


@pytest.mark.parametrize("name", FILES)
def test_compose_file_keeps_to_the_published_schema(name: str) -> None:
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema, which brings the compose specification's schema, is not installed")
    schema = ["--builtin-schema", "vendor.compose-spec"]
    command = [sys.executable, "-m", "check_jsonschema", *schema, str(ROOT / name)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stack_does_not_start_without_a_password() -> None:
    with pytest.raises(KeyError, match="REDIS_PASSWORD"):
        compose("compose.yaml", {"REDIS_PASSWORD": ""})


def test_stack_has_its_services_and_the_load_only_on_demand() -> None:
    assert set(services()) == {"redis", "worker", "producer", "prometheus", "grafana"}
    assert [name for name, service in services().items() if "profiles" in service] == ["producer"]


def test_ports_are_open_to_this_host_alone() -> None:
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:6379:6379", "127.0.0.1:9090:9090", "127.0.0.1:3000:3000"]


def test_worker_can_be_there_several_times() -> None:
    worker = services()["worker"]
    assert not {"ports", "container_name", "hostname"} & set(worker)
    assert len(worker["tmpfs"]) == 1
    assert worker["read_only"] is True


def test_worker_waits_for_a_healthy_redis_and_the_load_for_a_ready_worker() -> None:
    assert services()["worker"]["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert services()["producer"]["depends_on"] == {"worker": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", FILES)
def test_worker_understands_what_compose_tells_it(name: str) -> None:
    told = services()["worker"]["environment"] | services(name)["worker"]["environment"]
    assert set(told) <= VARIABLES
    found = settings_of(told)
    assert found.redis == f"redis://:{PASSWORD}@redis:6379/0"
    assert found.queue == services()["producer"]["environment"]["GLLM_QUEUE"] == "default"
    assert (found.model, found.device, found.kv_memory) == {
        "compose.yaml": ("smollm2", "auto", 512 * 2**20),
        "compose.gpu.yaml": ("/model", "cuda", None),
    }[name]


def test_all_agree_on_the_port_of_metrics() -> None:
    port = str(Settings().metrics_port)
    assert services()["worker"]["expose"] == [port]
    assert f'"127.0.0.1", {port}' in services()["worker"]["healthcheck"]["test"][-1]
    (found,) = documents(DEPLOY / "prometheus" / "prometheus.yml")[0]["scrape_configs"]
    (discovery,) = found["dns_sd_configs"]
    assert str(discovery["port"]) == port
    assert discovery["names"] == ["worker"]


def test_start_periods_exceed_a_measured_cold_load() -> None:
    for name in FILES:
        assert seconds(services(name)["worker"]["healthcheck"]["start_period"]) >= 5 * COLD_LOAD_SECONDS
    assert all("start_period" in service["healthcheck"] for name, service in services().items() if name != "producer")


def test_worker_is_given_the_time_it_needs_to_stop() -> None:
    needed = Settings().grace + LAST_WORDS_SECONDS + STOP_SECONDS
    assert seconds(services()["worker"]["stop_grace_period"]) > needed


def test_images_of_others_are_named_with_a_version() -> None:
    for name in ("redis", "prometheus", "grafana"):
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+[\w.-]*", services()[name]["image"])


def test_what_is_mounted_exists() -> None:
    mounted = [volume for service in services().values() for volume in service.get("volumes", [])]
    paths = [volume.partition(":")[0] for volume in mounted if volume.startswith("./")]
    assert len(paths) == 3
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_cpu_and_gpu_stack_take_torch_from_their_own_index() -> None:
    for service in ("worker", "producer"):
        assert services()[service]["build"]["args"]["TORCH_INDEX"].endswith("/cpu")
        assert services("compose.gpu.yaml")[service]["build"]["args"] == {"TORCH_INDEX": "", "DEMO_MODEL": ""}
    own = services(TORCH_INDEX="")["worker"]["build"]["args"]
    assert own["TORCH_INDEX"] is None


def test_gpu_stack_reserves_a_gpu_and_mounts_a_model() -> None:
    worker = services("compose.gpu.yaml")["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    (model,) = worker["volumes"]
    assert (model["source"], model["target"], model["read_only"]) == ("/srv/model", "/model", True)


# -- what the containers run, run here --------------------------------------------------------------------------------


@pytest.fixture
def stack_redis(tmp_path: Path) -> Iterator[Server]:
    """A server with the very options that compose.yaml gives its Redis."""
    binary = shutil.which("redis-server")
    if binary is None or shutil.which("redis-cli") is None:
        pytest.skip("redis-server and redis-cli are not installed")
    program, *options = services()["redis"]["command"]
    assert program == "redis-server"
    server = Server(Path(binary), tmp_path, *options)
    server.start()
    yield server
    server.stop(kill=True)


def test_redis_keeps_everything_and_wants_the_password(stack_redis: Server) -> None:
    with connect_sync(f"redis://:{PASSWORD}@127.0.0.1:{stack_redis.port}/0") as client:
        told = client.config_get("maxmemory-policy", "appendonly", "appendfsync", "maxmemory")
    wanted = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec", "maxmemory": str(2**30)}
    assert told == wanted


def redis_check(port: int, **environment: str) -> int:
    kind, line = services()["redis"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    line = line.replace("redis-cli", f"redis-cli -p {port}")
    return subprocess.run(["sh", "-c", line], check=False, env={**os.environ, **environment}, timeout=20).returncode


def test_redis_is_healthy_only_when_it_serves(stack_redis: Server) -> None:
    own = services()["redis"]["environment"]
    assert redis_check(stack_redis.port, **own) == 0
    assert redis_check(stack_redis.port) != 0
    stack_redis.stop()
    assert redis_check(stack_redis.port, **own) != 0


@contextmanager
def page(status: int) -> Iterator[int]:
    """A server on the port it yields that answers /readyz with this status."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def worker_check(port: int) -> int:
    kind, python, *arguments = services()["worker"]["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python")
    arguments[-1] = arguments[-1].replace("9400", str(port))
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL, timeout=20).returncode


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_worker_is_healthy_when_it_is_ready(status: int, healthy: bool) -> None:
    with page(status) as port:
        assert (worker_check(port) == 0) is healthy


def test_worker_is_not_healthy_when_nobody_answers() -> None:
    with socket.socket() as taken:  # bound and not listening: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        began = time.monotonic()
        assert worker_check(taken.getsockname()[1]) != 0
        assert time.monotonic() - began < seconds(services()["worker"]["healthcheck"]["timeout"])
