"""Fixtures for tests of the whole worker."""

from collections.abc import AsyncIterator

import pytest

from tests.worker.queue_bench import QueueBench
from tests.worker.service_bench import ServiceBench


@pytest.fixture
async def crew(bench: QueueBench, redis_url: str) -> AsyncIterator[ServiceBench]:
    """Workers in this process; those that still run at the end are stopped."""
    crew = ServiceBench(bench, redis_url)
    yield crew
    await crew.close()
