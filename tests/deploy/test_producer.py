"""The sample load, with the very command of compose.yaml, against a worker with a stand-in for the engine."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.deploy.files import PASSWORD, compose
from tests.servers import first_kind
from tests.worker.command_bench import Commands
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


async def test_sample_load_submits_jobs_that_share_prefixes_and_waits_for_their_replies(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(tokens_per_step=16))
    told = {"REDIS_PASSWORD": PASSWORD, "LOAD_JOBS": "9", "LOAD_JOBS_PER_SECOND": "100"}
    command = compose("compose.yaml", told)["services"]["producer"]["command"]
    process = Commands(crew.url, crew.bench.keys).process(*command, stdout=-1)
    output, _ = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0, output.decode()
    prompts = [request.tokens for request in worker.engine.added]
    assert len(prompts) == 9
    assert len({tuple(prompt[:96]) for prompt in prompts}) < 5
    assert len({tuple(prompt) for prompt in prompts}) == 9
