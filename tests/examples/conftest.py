"""Fixtures for the examples that need more than one file: workers in this process, on each kind of server."""

import importlib.util
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import gllm
from gllm.keys import Keys
from tests.docs.pages import ROOT
from tests.examples.web_bench import Web
from tests.worker.conftest import crew, own_crew

__all__ = ["crew", "own_crew"]

FOLDER = ROOT / "examples" / "web"


@pytest.fixture(scope="session")
def web_example() -> Any:
    """examples/web/server.py as a module; a script finds its neighbour beside it."""
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("web_example", FOLDER / "server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(FOLDER))
    return module


@pytest.fixture
async def web(web_example: Any, keys: Keys, redis_url: str) -> AsyncIterator[Web]:
    """The example's server on the test's queue."""
    client = gllm.Client(redis_url, keys.queue, patience=5)
    site = web_example.Site(client, (FOLDER / "page.html").read_bytes())
    async with client, site.listening(0) as port:
        yield Web(site, port)
    assert site.connections == set()
