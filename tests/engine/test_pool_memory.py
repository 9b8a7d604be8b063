"""What the KV pool may take of a CPU's memory, and when its pages are asked for."""

from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from engine.memory import _control_groups
from kernels.backend import TorchBackend


@pytest.mark.parametrize(
    ("line", "folders"),
    [
        ("0::/system.slice/gllm.service\n", ["system.slice/gllm.service", "system.slice"]),
        ("12:memory:/old\n0::/a\n", ["a"]),
        ("0::/\n", []),
        ("0::/../elsewhere\n", []),
        ("", []),
    ],
)
def test_control_groups_are_looked_at_up_to_the_root(tmp_path: Path, line: str, folders: list[str]):
    own = tmp_path / "cgroup"
    own.write_text(line)
    assert [*_control_groups(tmp_path, own)] == [tmp_path, *(tmp_path / folder for folder in folders)]


def test_a_machine_without_control_groups_has_none_to_look_at(tmp_path: Path):
    assert [*_control_groups(tmp_path, tmp_path / "missing")] == [tmp_path]


@pytest.mark.parametrize(("available", "settled"), [(1 << 40, True), (1 << 10, False)])
def test_pages_are_asked_for_only_where_the_pool_fits_twice(
    llama: Path, monkeypatch: pytest.MonkeyPatch, available: int, settled: bool
):
    told = list[int]()
    monkeypatch.setattr(TorchBackend, "settle", lambda self, cache: told.append(len(cache)))
    monkeypatch.setattr("engine.runner.available_bytes", lambda: available)
    Engine(EngineConfig(model=str(llama), device="cpu", kernels="torch", kv_blocks=8, max_sequences=2))
    assert bool(told) == settled
