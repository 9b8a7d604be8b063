"""A whole worker around a real engine process that compiles, hangs or meets an error of its device."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gllm import Client
from gllm.connection import connect
from gllm.keys import Keys
from tests.engine.talking import breakable_child
from worker import watchdog
from worker.config import Settings
from worker.service import FAILED, Service

JOB = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
SECONDS = 60.0


@pytest.fixture
async def client(one_url: str) -> AsyncIterator[Redis]:
    client = connect(one_url)
    yield client
    await client.aclose()


@pytest.fixture
async def service(
    tiny_model: Path, one_url: str, queue_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """A worker in this process whose engine's process breaks on request: the ids of jobs say how."""
    monkeypatch.setattr(sys, "executable", breakable_child(tmp_path))
    monkeypatch.setattr(watchdog, "HANG_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.05)
    settings = {"model": str(tiny_model), "redis": one_url, "queue": queue_name, "metrics_port": 0}
    service = Service(Settings(**settings, kv_blocks=64, threads=1, device="cpu", lease=30.0))
    yield service
    service.shutdown.signal()
    service.shutdown.signal()


async def submit(client: Redis, queue: str, job_id: str) -> None:
    await client.xadd(Keys(queue).jobs("normal", 0), {"id": job_id, "body": json.dumps(JOB)})


async def status(client: Redis, queue: str, job_id: str) -> tuple[bytes | None, bytes | None]:
    """State and attempts of a job that was handed back: none, and how often it was charged."""
    state, attempts = await client.hmget(Keys(queue).job(job_id), ["state", "attempts"])
    return state, attempts


async def test_engine_that_compiles_is_waited_for_and_one_that_hangs_is_given_up(
    service: Service, client: Redis, one_url: str, queue_name: str
) -> None:
    working = asyncio.create_task(service.run())
    await submit(client, queue_name, "compile")  # takes longer than a hang, and says why
    async with Client(one_url, queue_name) as reader:
        assert len((await reader.result("compile", timeout=SECONDS)).ids) == 4
        assert service.health.ready
        await submit(client, queue_name, "hang")
        async with asyncio.timeout(SECONDS):
            assert await working == FAILED

    assert not service.health.live
    assert service.health.reason == "no step ended in 1 s with work to do"
    assert await status(client, queue_name, "hang") == (None, b"1")


async def test_error_of_the_device_ends_the_worker_and_charges_its_step(
    service: Service, client: Redis, queue_name: str
) -> None:
    await submit(client, queue_name, "raise")
    async with asyncio.timeout(SECONDS):
        assert await service.run() == FAILED

    assert not service.health.live
    assert service.health.reason == "RuntimeError: injected"
    assert await status(client, queue_name, "raise") == (None, b"1")
