"""Fixtures of the client's tests, on the shared real servers."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis as redis_sync

from gllm.client import Client
from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.gllm.scribe import Scribe


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis_sync.Redis]:
    with connect_sync(redis_url) as client:
        yield client


@pytest.fixture
def scribe(raw: redis_sync.Redis, keys: Keys) -> Scribe:
    return Scribe(raw, keys, "job1")


@pytest.fixture
async def client(redis_url: str, keys: Keys) -> AsyncIterator[Client]:
    async with Client(redis_url, keys.queue) as client:
        yield client
