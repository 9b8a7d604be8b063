"""Fixtures for tests of the whole worker."""

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from redis.exceptions import RedisError

from gllm.connection import connect, connect_sync
from gllm.keys import Keys
from tests.conftest import immortal
from tests.servers import Server
from tests.worker.command_bench import Commands
from tests.worker.queue_bench import QueueBench
from tests.worker.service_bench import ServiceBench


@pytest.fixture
async def crew(bench: QueueBench, redis_url: str) -> AsyncIterator[ServiceBench]:
    """Workers in this process; those that still run at the end are stopped."""
    crew = ServiceBench(bench, redis_url)
    yield crew
    await crew.close()


@pytest.fixture
async def own_crew(own_server: Server, queue_name: str) -> AsyncIterator[ServiceBench]:
    """The same on a server of the test's own. If it still runs in the end, all keys have a life or are permanent."""
    client = connect(own_server.url)
    crew = ServiceBench(QueueBench(client, Keys(queue_name)), own_server.url)
    yield crew
    await crew.close()
    await client.aclose()
    with connect_sync(own_server.url) as checker, suppress(RedisError):
        assert immortal(checker, Keys(queue_name)) == []


@pytest.fixture
def commands(redis_url: str, keys: Keys) -> Commands:
    return Commands(redis_url, keys)
