"""Threads that wait give their core away."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_openmp_waits_passively_unless_told_otherwise(given, expected):
    """It must stand in the environment before torch is loaded, and `engine` is imported before torch is."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    code = "import sys, os, engine.child; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
