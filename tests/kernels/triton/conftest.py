"""Kernels on Triton's interpreter: `make test-triton`, in an environment of its own; elsewhere one test says why."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXPECTED = (
    # The interpreter's own loops take a number from an array of one: NumPy 2.4 refuses it, those before only warn.
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    "ignore:overflow encountered in exp:RuntimeWarning",  # on a card it is infinity, silently, and so is it meant
    # What attention leaves in places of nobody may be anything; later kernels compute with it, and nobody looks at it.
    "ignore:(overflow|invalid value) encountered in :RuntimeWarning",
)


def missing() -> str | None:
    """Why these tests cannot run here; None if they can."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "triton is not installed here: `make test-triton`"
    if not found.startswith("3.6."):
        return f"triton {found}: the kernels are checked with 3.6: `make test-triton`"
    if tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        return f"numpy {version('numpy')}: Triton's interpreter needs one below 2.4: `make test-triton`"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "TRITON_INTERPRET is not 1: `make test-triton`"
    return None


MISSING = missing()
collect_ignore_glob = ["test_triton_*.py"] if MISSING else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for rule in EXPECTED:
                item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.fixture
def why_not() -> str | None:
    return MISSING
