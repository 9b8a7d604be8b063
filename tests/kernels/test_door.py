"""What `kernels` offers: each name from its own module, and none of it before it is asked for."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kernels

TREE = ast.parse(Path(kernels.__file__).read_text())
HOMES = {
    alias.name: node.module
    for node in ast.walk(TREE)
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kernels.")
    for alias in node.names
}


def test_each_name_of_kernels_comes_from_the_module_that_the_type_checker_is_told():
    assert sorted(HOMES) == sorted(kernels.__all__)
    for name, module in HOMES.items():
        assert getattr(kernels, name) is getattr(import_module(module), name), name
    with pytest.raises(AttributeError, match="module 'kernels' has no attribute 'abacus'"):
        _ = kernels.abacus


def test_names_of_kernels_wait_until_one_is_asked_for():
    loaded = "print('torch' in sys.modules)"
    code = f"import sys, kernels.cpu.early; {loaded}; kernels.Heads; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\nTrue\n", done.stderr
