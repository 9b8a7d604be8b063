"""Builds the worker's image without a Docker engine, and runs its files as a container would."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.files import ROOT

SUITE, PYTHON = "bookworm", "3.11"  # what python:3.11-slim-bookworm, the default base, is made from
TOOLS = ("buildah", "debootstrap", "unshare", "chroot")
IMAGE = "gllm-test"
OURS = ("index-url", "extra-index-url", "trusted-host", "proxy", "cert")  # of pip's settings, what the build needs too
# $1 root, $2 uid, then the command: process 1 of its own, a read-only root with one tmpfs, and a user that has no name.
CONTAINER = """
root=$1 uid=$2; shift 2
mount --make-rprivate / && mount --bind "$root" "$root" && mount --rbind /dev "$root/dev" \
&& mount -t proc proc "$root/proc" && mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/tmp" \
&& mount -o remount,bind,ro "$root" && exec chroot --userspec="$uid:$uid" "$root" /usr/bin/env -i "$@"
"""


def need_tools() -> None:
    """Skips the test where an image cannot be built."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian and Ubuntu: apt-get install buildah debootstrap)")
    if os.geteuid() != 0:
        pytest.skip("root is needed to build and mount an image")


def run(*command: str | Path) -> str:
    """What it printed. Fails the test with what it said when it fails."""
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def pip(*arguments: str | Path) -> str:
    return run(sys.executable, "-m", "pip", *arguments)


def torch_wheel(folder: Path) -> None:
    """Fetch the CPU wheel from TORCH_INDEX, or from where pip looks here; skips when there is only a CUDA build."""
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    wanted = ["--no-deps", "--python-version", PYTHON, "--only-binary", ":all:", "--constraint", "constraints.txt"]
    plan = pip("install", "--quiet", "--dry-run", "--report", "-", "--target", folder, *index, *wanted, "torch")
    version = json.loads(plan)["install"][0]["metadata"]["version"]
    if not version.endswith("+cpu"):
        pytest.skip(f"pip would take torch {version} here, a build with CUDA; set TORCH_INDEX to a CPU index")
    pip("download", "--quiet", "--dest", folder, *index, *wanted, "torch")


@contextmanager
def index_of(folder: Path) -> Iterator[str]:
    """The URL of a package index with the wheels of a folder as project torch."""
    (folder / "torch").mkdir()
    for wheel in folder.glob("*.whl"):
        wheel.rename(folder / "torch" / wheel.name)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class Images:
    """A buildah store of one's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buildah = ("buildah", "--root", folder / "store", "--runroot", folder / "run")

    def buildah(self, *arguments: str | Path) -> str:
        return run(*self._buildah, *arguments).strip()

    def make_base(self) -> str:
        """Debian with Python, under a name that FROM understands."""
        root = self._folder / "base"
        run("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", SUITE, root)
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, root, "/")
        self.buildah("commit", "--quiet", "--rm", container, "localhost/base")
        shutil.rmtree(root)
        return "localhost/base"

    def build(self, base: str, torch_index: str) -> None:
        arguments = [f"--build-arg={name}={value}" for name, value in (("BASE", base), ("TORCH_INDEX", torch_index))]
        mounts = self._pip_settings()
        self.buildah("bud", "--quiet", "--isolation", "chroot", *arguments, *mounts, "--tag", IMAGE, ".")

    def _pip_settings(self) -> list[str]:
        """Mounts for the build alone: pip's indexes and certificates are this machine's business, not the image's."""
        found = re.findall(r"^[^.]+\.([\w-]+)='(.*)'$", pip("config", "list"), re.MULTILINE)
        settings = {name: value.replace("\\n", " ") for name, value in found if name in OURS}
        written = self._folder / "pip.conf"
        written.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items())]))
        mounts = {str(written): "/etc/pip.conf"}
        if "cert" in settings:
            mounts[settings["cert"]] = settings["cert"]
        return [f"--volume={here}:{there}:ro" for here, there in mounts.items()]

    def config(self) -> dict[str, Any]:
        """User, Env, Entrypoint and the like."""
        return json.loads(self.buildah("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """The root file system of a container."""
        container = self.buildah("from", "--pull-never", IMAGE)
        try:
            yield Path(self.buildah("mount", container))
        finally:
            self.buildah("umount", container)
            self.buildah("rm", container)


def wrapped(root: Path, environment: Sequence[str], uid: int = 54321) -> list[str]:
    """Words to put before a command so that it runs in the root as the first process of a container."""
    own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", CONTAINER, "sh"]
    return [*own, str(root), str(uid), *environment]
