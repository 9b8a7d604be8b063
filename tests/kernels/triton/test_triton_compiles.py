"""Every variant compiles for sm_80, sm_90 and sm_100 and fits: no spills, shared memory, wide loads, matrix units.

No card, no driver and no CUDA build of torch is needed. Results are kept under a digest in pytest's cache.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.compiling import digest
from tests.kernels.triton.variants import every_variant

ROOT = Path(__file__).resolve().parents[3]
SHARES = 4  # of all variants: each is a test, so that two processes at most compile at once
# Bytes of stack. The assembler, when it aims at one more block an SM, parks up to four numbers outside of all loops in
# some variants of float32 and of heads of 256; it leaves registers unused then. What spills in earnest takes far more.
PARKED = 16
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a block may have


def compile_share(share: int, folder: Path) -> None:
    """In a process of its own: where the interpreter is on, nothing can be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "compiler")
    command = [sys.executable, "-m", "tests.kernels.triton.compiling", str(share), str(SHARES), str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=880)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", range(SHARES))
def test_triton_variants_compile_without_spills_for_three_cards(share, pytestconfig):
    folder = pytestconfig.rootpath / ".pytest_cache" / "triton"
    folder.mkdir(parents=True, exist_ok=True)
    compile_share(share, folder)
    work = [(variant, target) for variant in every_variant() for target in variant.targets]
    wrong: list[str] = []
    for variant, target in work[share::SHARES]:
        found = json.loads((folder / f"{digest(variant, target)}.json").read_text())
        wrong += [f"{variant.name} on sm_{target}: {fault}" for fault in faults(variant, target, found)]
    assert wrong == []


def faults(variant, target, found):
    if "error" in found:
        return [found["error"]]
    return [
        fault
        for fault, wrong in (
            (f"{found['stack']} bytes of stack: registers spill", found["stack"] > PARKED),
            (f"{found['shared']} bytes of shared memory", found["shared"] > SHARED_MEMORY[target]),
            (f"loads of {found['loads']} bytes: none of 16", variant.wide_loads and 16 not in found["loads"]),
            ("no wgmma", variant.matrix_units and target == 90 and not found["wide_products"]),
        )
        if wrong
    ]


def test_every_kernel_has_a_variant_that_is_compiled():
    """What `name[grid](...)` starts; the two prefills are started by one name."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "kernels" / "triton").glob("*.py")]
    calls = [node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    started = {ast.unparse(call.value).rpartition(".")[2] for call in calls if isinstance(call, ast.Subscript)}
    kernels = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef) and jitted(node)}
    compiled = {variant.kernel.__name__ for variant in every_variant()}
    assert compiled == started & kernels | {"prefill_tiles", "prefill_splits"}


def jitted(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)
