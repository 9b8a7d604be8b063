"""Imports run one way (docs: CONTRIBUTING.md): gllm and kernels import nothing of ours; engine imports kernels; worker
imports gllm and the torch-free part of engine. Read from the AST, and proved once more by importing with torch blocked.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"gllm", "worker", "engine", "kernels", "benchmarks", "tests"}
MAY_IMPORT = {
    "gllm": {"gllm"},
    "kernels": {"kernels"},
    "engine": {"engine", "kernels"},
    "worker": {"worker", "gllm", "engine"},
}
THIRD_PARTY_AT_IMPORT = {
    "gllm": {"redis", "msgspec"},
    "kernels": {"torch", "triton"},
    "engine": {"torch", "safetensors", "msgspec", "gguf", "numpy"},  # gguf and numpy: only where a GGUF file is read
}
TORCH_FREE = (
    "config", "early", "errors", "request", "wire", "sequence", "blocks", "plan", "counters", "timing", "scheduler",
    "validate", "settings", "rehearsal", "families", "ropeconfig", "modelconfig", "gguf_head", "checkpoint",
)  # fmt: skip
SEEN_BY_WORKER = {
    "engine.checkpoint", "engine.config", "engine.early", "engine.errors", "engine.gguf_head", "engine.request",
    "engine.wire",
}  # fmt: skip
NEVER = {"engine": {"redis", "asyncio"}, "kernels": {"redis", "asyncio"}, "worker": {"torch"}, "gllm": {"torch"}}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Absolute names of all modules that a tree imports, `from a import b` as a.b too when it could be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def at_import(tree: ast.Module) -> Iterator[str]:
    """What is imported when the module is: everything outside of functions and `if TYPE_CHECKING`."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            waiting += [child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom)]


def relative_imports(tree: ast.AST) -> list[int]:
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 0]


def top(module: str) -> str:
    return module.partition(".")[0]


CASES = [pytest.param(path, id=str(path.relative_to(ROOT))) for package in MAY_IMPORT for path in sources(package)]


@pytest.mark.parametrize("path", CASES)
def test_imports_run_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text())
    names = set(imports(tree))
    assert {top(name) for name in names} & OURS <= MAY_IMPORT[package]
    assert {top(name) for name in names} & NEVER[package] == set()
    assert relative_imports(tree) == [], "absolute imports only: they say which layer is meant"
    others = {top(name) for name in at_import(tree)} - OURS - set(sys.stdlib_module_names)
    assert others <= THIRD_PARTY_AT_IMPORT.get(package, others)


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in sources("worker")])
def test_worker_imports_only_the_torch_free_part_of_engine(path: Path) -> None:
    """Functions that run in the engine's process may import more, when they run."""
    assert {name for name in at_import(ast.parse(path.read_text())) if top(name) == "engine"} <= SEEN_BY_WORKER


def run_with_blocked(blocked: set[str], code: str) -> None:
    """Run code in a fresh interpreter in which the named packages do not exist."""
    guard = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Blocked())
"""
    done = subprocess.run(
        [sys.executable, "-c", guard + code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", TORCH_FREE)
def test_brain_of_the_engine_needs_no_torch(name: str) -> None:
    run_with_blocked({"torch", "numpy", "safetensors", "gguf"}, f"import engine.{name}")


def test_engine_needs_torch_safetensors_and_msgspec_only() -> None:
    extras = {"redis", "prometheus_client", "structlog", "uvloop", "tokenizers", "jinja2", "gguf", "huggingface_hub",
              "click", "transformers", "rich", "gllm", "worker"}  # fmt: skip
    run_with_blocked(extras, "import kernels, engine; engine.Engine; engine.EngineConfig; engine.SamplingParams")


def test_asyncio_parent_never_loads_torch() -> None:
    run_with_blocked(set(), "import worker.service, worker.cli, worker.intake; assert 'torch' not in sys.modules")
