"""Fixtures for what docs/ and examples/ promise: workers in this process, on each kind of server."""

import importlib.util
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.worker.conftest import crew, own_crew

__all__ = ["crew", "own_crew"]


@pytest.fixture(scope="session")
def example() -> Any:
    """examples/producer.py as a module."""
    spec = importlib.util.spec_from_file_location("example_producer", ROOT / "examples" / "producer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
