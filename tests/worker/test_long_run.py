"""What adds up: thousands of jobs, restarts by the dozen, and lines that are late, silent or cut for a while."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from gllm import Client
from gllm.connection import connect_sync
from gllm.keys import GROUP
from gllm.protocol import Done
from tests.conftest import immortal, leftovers
from tests.proxy import Proxy
from tests.servers import Server, first_kind
from tests.worker.failover import Reader
from tests.worker.fake_engine import FakeEngine, script
from tests.worker.service_bench import ServiceBench
from worker.service import OK

MANY = 5000


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough here: what depends on the server is tested with the scripts and the outages."""
    return first_kind()


@pytest.fixture
async def proxy(own_server: Server) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", own_server.port) as proxy:
        yield proxy


def truth(prompt: str, count: int) -> list[int]:
    return script([3 + byte for byte in prompt.encode()], count)


async def test_thousands_of_short_jobs_leave_nothing_in_the_job_stream_and_no_key_that_stays(
    own_crew: ServiceBench, own_server: Server
) -> None:
    redis, keys = own_crew.bench.redis, own_crew.bench.keys
    worker = await own_crew.start(engine=FakeEngine(max_sequences=64, step_seconds=0.001), lease=15.0)
    body = '{"prompt":"hello","max_tokens":1,"temperature":0}'
    async with redis.pipeline(transaction=False) as many:
        for n in range(MANY):
            many.xadd(keys.jobs("normal", 0), {"id": f"j{n}", "body": body})
        await many.execute()

    async def all_ended() -> bool:
        return 'gllm_jobs_total{outcome="length"} 5000.0' in worker.service.metrics.render().decode()

    await own_crew.until_async(all_ended, "the last job", seconds=90)
    assert await worker.stop() == OK

    assert await redis.xlen(keys.jobs("normal", 0)) == 0
    assert await redis.memory_usage(keys.jobs("normal", 0)) < 20_000
    with connect_sync(own_server.url) as client:
        assert (immortal(client, keys), leftovers(client, keys)) == ([], [])
    assert (await own_crew.reply(f"j{MANY - 1}")).ids == truth("hello", 1)


async def test_restarts_of_every_kind_leave_no_consumer_and_no_worker_behind(
    own_crew: ServiceBench, own_server: Server
) -> None:
    keys = own_crew.bench.keys
    for n in range(20):
        worker = await own_crew.start(lease=0.2)
        await own_crew.submit(f"j{n}", max_tokens=2)
        await own_crew.reply(f"j{n}")
        if n % 2:
            assert await worker.stop() == OK
        else:
            await own_crew.submit(f"cut{n}", max_tokens=4000)
            await own_crew.published(f"cut{n}", 1)
            await worker.kill()
            await own_crew.bench.redis.set(keys.cancel(f"cut{n}"), 1, ex=60)
    last = await own_crew.start(lease=0.2)

    async def reaped() -> bool:
        consumers = await own_crew.bench.redis.xinfo_consumers(keys.jobs("normal", 0), GROUP)
        return {consumer["name"] for consumer in consumers} <= {b"-released", last.service.name.encode()}

    await own_crew.until_async(reaped, "the reaper", seconds=30)
    assert await last.stop() == OK
    with connect_sync(own_server.url) as client:
        assert leftovers(client, keys) == []
    assert 'gllm_recoveries_total{path="consumer_reaped"} 0.0' not in last.service.metrics.render().decode()


async def test_late_answers_mix_no_two_replies_up_when_jobs_are_cancelled_and_workers_drain(
    own_crew: ServiceBench, proxy: Proxy
) -> None:
    """RS-H6: whoever gives up on a command must never read its answer as that of the next one."""
    proxy.delay = 0.1
    first = await own_crew.start(redis=proxy.url, lease=6.0, grace=0.3, engine=FakeEngine(max_sequences=32))
    for n in range(50):
        await own_crew.submit(f"j{n}", prompt=f"p{n}", max_tokens=150)
    await own_crew.published("j20", 1)
    for n in range(0, 50, 3):
        await own_crew.bench.redis.set(own_crew.bench.keys.cancel(f"j{n}"), 1, ex=60)
    assert await first.stop() == OK
    await own_crew.start(redis=proxy.url, lease=6.0, engine=FakeEngine(max_sequences=64))

    for n in range(50):
        reply = await own_crew.reply(f"j{n}")
        assert isinstance(reply.end, Done)
        assert reply.ids == truth(f"p{n}", 150)[: len(reply.ids)]
        assert (reply.end.finish_reason == "cancelled") or len(reply.ids) == 150
    await own_crew.bench.clear_streams()


SILENCES = [
    pytest.param(1.5, 0.6, id="beyond the lease"),
    pytest.param(10.0, 3.0, id="ten seconds, beyond the lease", marks=pytest.mark.slow),
    pytest.param(10.0, 15.0, id="ten seconds, within the lease", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("seconds", "lease"), SILENCES)
async def test_traffic_that_is_swallowed_and_comes_late_doubles_nothing_and_loses_nothing(
    own_crew: ServiceBench, proxy: Proxy, seconds: float, lease: float
) -> None:
    """What the first worker had sent arrives when another one has long gone on with its jobs; its clients read on."""
    cut_off = await own_crew.start(redis=proxy.url, lease=lease, engine=FakeEngine(step_seconds=0.01))
    async with Client(proxy.url, own_crew.bench.keys.queue) as near, Client(own_crew.url, near._keys.queue) as far:
        for n in range(4):
            await own_crew.submit(f"j{n}", prompt=f"p{n}", max_tokens=300)
            await own_crew.published(f"j{n}", 3)
        readers = [Reader(client, f"j{n}") for n in range(4) for client in (near, far)]
        other = await own_crew.start(lease=lease, engine=FakeEngine(step_seconds=0.01))
        began = time.monotonic()
        proxy.swallow = True
        await own_crew.until(lambda: not cut_off.ready, "readiness to turn false", seconds=lease / 3 + 5)
        await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
        proxy.swallow = False
        for reader in readers:
            await reader.end()

    for reader in readers:
        assert reader.error is None
        assert reader.ids == truth(f"p{reader.id[1:]}", 300)
    await own_crew.until(lambda: cut_off.ready, "readiness to come back")
    assert bool(other.engine.added) == (seconds > lease)
    await own_crew.until_async(_nothing_left(own_crew), "empty streams")


def _nothing_left(crew: ServiceBench):
    async def empty() -> bool:
        return not await crew.bench.redis.xlen(crew.bench.keys.jobs("normal", 0))

    return empty
