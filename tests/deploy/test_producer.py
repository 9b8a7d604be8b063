"""The sample load, as compose runs it, against a worker with a stand-in for the engine."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.deploy.files import DEPLOY
from tests.servers import first_kind
from tests.worker.fake_engine import FakeEngine
from tests.worker.queue_bench import QueueBench
from tests.worker.service_bench import ServiceBench


@pytest.fixture
def server_kind() -> str:
    return first_kind()


@pytest.fixture
async def crew(bench: QueueBench, redis_url: str) -> AsyncIterator[ServiceBench]:
    crew = ServiceBench(bench, redis_url)
    yield crew
    await crew.close()


async def load(crew: ServiceBench, jobs: int) -> tuple[int, list[str]]:
    """Exit status and lines of deploy/producer/load.py."""
    told = {"GLLM_REDIS": crew.url, "GLLM_QUEUE": crew.bench.keys.queue}
    told |= {"LOAD_JOBS": str(jobs), "LOAD_JOBS_PER_SECOND": "100"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(DEPLOY / "producer" / "load.py"), env={**os.environ, **told}, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode().splitlines()


async def test_sample_load_submits_chats_and_waits_for_their_replies(crew: ServiceBench) -> None:
    worker = await crew.start()
    status, lines = await load(crew, 5)
    assert (status, lines[-1], len(lines)) == (0, "5 of 5 chats ended well", 6)
    assert len(worker.engine.added) == 5


async def test_sample_load_tells_of_chats_that_failed(crew: ServiceBench) -> None:
    """The model is too small for the question, so the worker refuses it."""
    engine = FakeEngine()
    engine.info = msgspec.structs.replace(engine.info, max_model_len=16)
    await crew.start(engine=engine)
    status, lines = await load(crew, 1)
    assert (status, lines[-1]) == (1, "0 of 1 chats ended well")
    assert "16" in lines[0]
