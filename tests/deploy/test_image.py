"""The image: what its recipe says, and, in `make test-all`, that it builds, serves and stops as a container does."""

import json
import os
import re
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import gllm
from tests.deploy.files import PASSWORD, ROOT, VARIABLES, compose, dockerfile
from tests.deploy.image import Images, index_of, need_tools, torch_wheel, wrapped
from tests.e2e.worker_process import WorkerProcess
from tests.servers import Server, binaries, first_kind
from worker.config import Settings, resolve
from worker.embedded import free_port
from worker.models import DEMO_INSTALL

LARGEST_IMAGE = 1.3 * 2**30  # bytes of the files in it, 1.2 GB when this was written; CUDA would be some GB more


def last_stage() -> list[tuple[str, str]]:
    steps = dockerfile()
    begins = max(index for index, (name, _) in enumerate(steps) if name == "FROM")
    return steps[begins:]


def variables() -> dict[str, str]:
    return dict(word.split("=", 1) for name, argument in last_stage() if name == "ENV" for word in argument.split())


def test_image_starts_the_worker_itself_as_an_unknown_user() -> None:
    steps = dict(last_stage())
    assert json.loads(steps["ENTRYPOINT"]) == ["gllm"]  # a list: no shell stands between a SIGTERM and the worker
    assert json.loads(steps["CMD"]) == ["worker"]
    assert int(steps["USER"].partition(":")[0]) > 0
    assert int(steps["EXPOSE"]) == Settings().metrics_port


def test_image_tells_the_worker_to_listen_to_its_scraper() -> None:
    told = {name: value for name, value in variables().items() if name.startswith("GLLM_")}
    assert set(told) <= VARIABLES
    assert resolve({}, told).settings.metrics_host == "0.0.0.0"
    assert "HOME" not in variables()


def test_image_gets_what_the_wheel_is_made_of_and_nothing_else() -> None:
    (found,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"].values()
    sources = {name.removesuffix("*") for name in found}
    sources |= {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    copied = {word for name, argument in dockerfile() if name == "COPY" for word in argument.split()[:-1]}
    assert {word for word in copied if not word.startswith(("--from", "/opt/"))} == sources
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == sources


def test_image_has_the_demo_model_that_everybody_else_has() -> None:
    (model,) = [argument for name, argument in dockerfile() if name == "ARG" and argument.startswith("DEMO_MODEL=")]
    assert model.removeprefix("DEMO_MODEL=") == DEMO_INSTALL.rpartition(" ")[2]


def test_recipe_names_no_index() -> None:
    assert re.findall(r"https?://", (ROOT / "Dockerfile").read_text()) == []


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    need_tools()
    folder = tmp_path_factory.mktemp("image")
    torch_wheel(folder / "index")
    images = Images(folder)
    with index_of(folder / "index") as index:
        images.build(images.make_base(), index)
    yield images
    images.buildah("rmi", "--all", "--force")


@pytest.fixture
def image_redis(tmp_path: Path) -> Iterator[Server]:
    server = Server(binaries()[first_kind()], tmp_path)
    server.start()
    yield server
    server.stop(kill=True)


def files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_built_image_is_small_and_knows_no_cuda(images: Images) -> None:
    with images.mounted() as root:
        opt = list(files(root / "opt"))
        assert sum(path.stat().st_size for path in files(root)) < LARGEST_IMAGE
        assert [path for path in opt if re.match(r"lib(cu|nv|torch_cuda|c10_cuda).*\.so", path.name)] == []
        assert [path for path in opt if path.name in ("pip", "cc", "gcc")] == []
        assert [path for path in opt if path.suffix == ".gguf"] != []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_built_image_serves_and_stops_in_time(images: Images, image_redis: Server, tmp_path: Path) -> None:
    """Process 1, a read-only root, one tmpfs, a user that nobody knows, no HOME; SIGTERM in the middle of a reply."""
    config = images.config()
    told = [f"GLLM_REDIS={image_redis.url}", f"GLLM_METRICS_PORT={free_port()}", "GLLM_KV_MEMORY=128MiB"]
    with images.mounted() as root:
        (command,), flags = config["Entrypoint"], config["Cmd"]
        assert flags == ["worker"]
        wrap = wrapped(root, [*config["Env"], *told, "OMP_WAIT_POLICY=passive"])
        worker = WorkerProcess(tmp_path / "worker.log", wrap=wrap, command=[command])
        try:
            worker.wait_event("ready")
            first = worker.descendants()[0]
            words = Path(f"/proc/{first}/environ").read_bytes().split(b"\0")
            assert [word for word in words if word.startswith(b"HOME=")] == []
            check_sample_load([*wrap, command])
            check_term_in_mid_reply(worker, first, image_redis.url)
        finally:
            worker.end()


def check_sample_load(command: list[str]) -> None:
    """What compose's producer runs, from the image."""
    told = {"REDIS_PASSWORD": PASSWORD, "LOAD_JOBS": "6", "LOAD_JOBS_PER_SECOND": "20"}
    load = compose("compose.yaml", told)["services"]["producer"]["command"]
    done = subprocess.run([*command, *load], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 ended well" in done.stdout


def check_term_in_mid_reply(worker: WorkerProcess, first: int, url: str) -> None:
    with gllm.SyncClient(url) as client:
        job = client.submit(prompt="Once upon a time", max_tokens=24, temperature=0, ignore_eos=True)
        next(reply for reply in client.stream(job) if reply.text)
        os.kill(first, signal.SIGTERM)
        began = time.monotonic()
        assert worker.wait_exit() == 0, worker.said
        assert time.monotonic() - began < Settings().grace
        assert len(client.result(job, timeout=1).ids) == 24
