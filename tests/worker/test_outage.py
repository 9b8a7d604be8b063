"""Redis away, frozen, loading, flushed, full, or losing answers: the worker waits, says so, and goes on by itself."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from urllib.request import urlopen

import pytest
import structlog

from gllm.protocol import Done
from tests.proxy import Proxy
from tests.servers import Server
from tests.worker.fake_engine import FakeEngine, script
from tests.worker.service_bench import ServiceBench, Worker
from worker import logs
from worker.jobs import BUFFER_TOKENS
from worker.service import OK, REFUSED

HELLO = [3 + byte for byte in b"hello"]


@pytest.fixture
def log_lines() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
async def proxy(own_server: Server) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", own_server.port) as proxy:
        yield proxy


def freeze(server: Server) -> None:
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)


def thaw(server: Server) -> None:
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGCONT)


async def probe(worker: Worker, path: str) -> int:
    address = worker.service.address
    assert address is not None

    def get() -> int:
        try:
            with urlopen(f"http://{address.host}:{address.port}{path}", timeout=5) as answer:
                return answer.status
        except OSError as error:
            return getattr(error, "code", 0)

    return await asyncio.to_thread(get)


async def test_worker_waits_for_redis_and_names_the_url_without_the_password(
    own_crew: ServiceBench, own_server: Server, log_lines: list[structlog.typing.EventDict]
) -> None:
    own_server.stop()
    url = own_server.url.replace("redis://", "redis://:secret@")
    worker = await own_crew.start(wait=False, redis=url)
    await own_crew.until(lambda: [line for line in log_lines if line["event"] == logs.REDIS_WAITING], "a log line")
    assert (await probe(worker, "/livez"), await probe(worker, "/readyz")) == (200, 503)

    own_server.start("--requirepass", "secret")
    await own_crew.until(lambda: worker.ready, "the worker")

    assert "secret" not in str(log_lines)
    assert str(own_server.port) in str([line for line in log_lines if line["event"] == logs.REDIS_WAITING])
    assert await worker.stop() == OK


async def test_wrong_password_is_an_error_at_once(
    own_crew: ServiceBench, own_server: Server, log_lines: list[structlog.typing.EventDict]
) -> None:
    own_server.stop()
    own_server.start("--requirepass", "secret")
    worker = await own_crew.start(wait=False, redis=own_server.url.replace("redis://", "redis://:wrong@"))

    assert await worker.task == REFUSED
    assert logs.REDIS_REFUSED in [line["event"] for line in log_lines]
    assert "wrong@" not in str(log_lines)


async def test_worker_waits_while_redis_is_loading(own_crew: ServiceBench, proxy: Proxy) -> None:
    proxy.loading = True
    worker = await own_crew.start(wait=False, redis=proxy.url)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await asyncio.shield(worker.task)
    proxy.loading = False
    await own_crew.submit("a")

    assert (await own_crew.reply("a")).ids == script(HELLO, 8)


@pytest.mark.parametrize("lease", [0.6, 3.0])
async def test_frozen_redis_turns_readiness_false_in_time_and_liveness_stays(
    own_crew: ServiceBench, own_server: Server, lease: float
) -> None:
    worker = await own_crew.start(lease=lease)
    freeze(own_server)
    began = time.monotonic()
    try:
        await own_crew.until(lambda: not worker.ready, "readiness to turn false")
        assert time.monotonic() - began < lease / 3 + 1
        assert (await probe(worker, "/livez"), await probe(worker, "/readyz")) == (200, 503)
    finally:
        thaw(own_server)

    await own_crew.until(lambda: worker.ready, "readiness to come back")
    await own_crew.submit("a")
    assert (await own_crew.reply("a")).ids == script(HELLO, 8)


async def test_frozen_redis_pauses_the_engine_and_no_token_is_lost(own_crew: ServiceBench, own_server: Server) -> None:
    worker = await own_crew.start(lease=1.0, engine=FakeEngine(step_seconds=0.01))
    await own_crew.submit("a", max_tokens=200)
    await own_crew.published("a", 5)
    freeze(own_server)
    try:
        await own_crew.until(lambda: "a" in worker.engine.held, "the engine to be held")
        (job,) = worker.jobs
        assert job.n < 200  # the lease is what holds it: the buffer has room for all
    finally:
        thaw(own_server)

    assert (await own_crew.reply("a")).ids == script(HELLO, 200)
    assert 'gllm_recoveries_total{path="paused"} 1.0' in worker.service.metrics.render().decode()


async def test_job_buffers_256_tokens_and_is_then_not_stepped_any_more(own_crew: ServiceBench, proxy: Proxy) -> None:
    worker = await own_crew.start(lease=30.0, redis=proxy.url, engine=FakeEngine(step_seconds=0.001))
    await own_crew.submit("a", max_tokens=2000)
    await own_crew.published("a", 5)
    proxy.swallow = True
    await own_crew.until(lambda: "a" in worker.engine.held, "the engine to be held")

    (job,) = worker.jobs
    assert BUFFER_TOKENS <= job.unpublished < BUFFER_TOKENS + 5
    proxy.swallow = False
    assert (await own_crew.reply("a")).ids == script(HELLO, 2000)


async def test_restart_of_redis_loses_and_doubles_no_token(own_crew: ServiceBench, own_server: Server) -> None:
    own_server.stop()
    own_server.options = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
    own_server.start()
    worker = await own_crew.start(engine=FakeEngine(step_seconds=0.005))
    await own_crew.submit("a", max_tokens=400)
    await own_crew.published("a", 20)

    own_server.stop(kill=True)
    await own_crew.until(lambda: not worker.ready, "readiness to turn false")
    own_server.start()

    reply = await own_crew.reply("a")
    assert reply.ids == script(HELLO, 400)
    assert worker.ready
    await own_crew.bench.clear_streams()


async def test_flushall_under_an_idle_worker(
    own_crew: ServiceBench, log_lines: list[structlog.typing.EventDict]
) -> None:
    worker = await own_crew.start(lease=3.0)
    await own_crew.bench.redis.flushall()
    await own_crew.bench.redis.config_resetstat()
    await asyncio.sleep(1.5)  # a worker that asks again and again makes hundreds of calls in this time
    stats = await own_crew.bench.redis.info("commandstats")
    await own_crew.submit("a")

    assert (await own_crew.reply("a")).ids == script(HELLO, 8)
    assert stats["cmdstat_evalsha"]["calls"] < 20
    assert len([line for line in log_lines if line["event"] == logs.GROUP_LOST]) < 5
    assert worker.ready


async def test_flushall_under_a_running_job_drops_it_and_the_worker_goes_on(own_crew: ServiceBench) -> None:
    worker = await own_crew.start()
    await own_crew.submit("a", max_tokens=4000)
    await own_crew.published("a", 3)

    await own_crew.bench.redis.flushall()
    await own_crew.until(lambda: "a" in worker.engine.cancelled, "the job to be dropped")
    await own_crew.submit("b")

    assert (await own_crew.reply("b")).ids == script(HELLO, 8)
    assert await own_crew.bench.field("a", "n") is None


async def test_full_redis_turns_readiness_false_and_nothing_is_lost(own_crew: ServiceBench) -> None:
    worker = await own_crew.start(engine=FakeEngine(step_seconds=0.005))
    await own_crew.submit("a", max_tokens=300)
    await own_crew.published("a", 3)
    await own_crew.bench.redis.config_set("maxmemory", 1)
    await own_crew.until(lambda: not worker.ready, "readiness to turn false")
    await own_crew.bench.redis.config_set("maxmemory", 0)

    assert (await own_crew.reply("a")).ids == script(HELLO, 300)
    assert worker.ready


async def test_script_flush_is_not_noticed(own_crew: ServiceBench) -> None:
    worker = await own_crew.start()
    await own_crew.submit("a", max_tokens=200)
    for count in (3, 50, 100):
        await own_crew.published("a", count)
        await own_crew.bench.redis.script_flush()

    assert (await own_crew.reply("a")).ids == script(HELLO, 200)
    assert 'gllm_redis_errors_total{class="transient"} 0.0' in worker.service.metrics.render().decode()


async def test_lost_answers_double_nothing_and_lose_nothing(own_crew: ServiceBench, proxy: Proxy) -> None:
    await own_crew.start(redis=proxy.url, lease=2.0, engine=FakeEngine(max_sequences=8))
    proxy.cut = 0.1
    for n in range(20):
        await own_crew.submit(f"j{n}", prompt=f"p{n}", max_tokens=60)

    for n in range(20):
        reply = await own_crew.reply(f"j{n}")
        assert reply.ids == script([3 + byte for byte in f"p{n}".encode()], 60)
        assert isinstance(reply.end, Done)
    assert proxy.cuts > 3
    proxy.cut = 0.0
    await own_crew.bench.clear_streams()


async def test_idle_worker_makes_no_errors_and_starts_a_job_at_once(
    own_crew: ServiceBench, log_lines: list[structlog.typing.EventDict]
) -> None:
    worker = await own_crew.start(lease=15.0)
    quiet_until = time.monotonic() + 2.5  # longer than a blocking read
    await own_crew.until(lambda: time.monotonic() > quiet_until, "some idle time")
    began = time.monotonic()
    await own_crew.submit("a", max_tokens=1)
    await own_crew.reply("a")

    assert time.monotonic() - began < 0.5
    assert [line for line in log_lines if line["log_level"] in ("warning", "error")] == []
    assert worker.ready


async def test_two_workers_share_a_queue(own_crew: ServiceBench) -> None:
    workers = [await own_crew.start(engine=FakeEngine(max_sequences=4, step_seconds=0.002)) for _ in range(2)]
    for n in range(60):
        await own_crew.submit(f"j{n}", max_tokens=20)
    for n in range(60):
        assert (await own_crew.reply(f"j{n}")).ids == script(HELLO, 20)

    counts = [len(worker.engine.added) for worker in workers]
    assert sum(counts) == 60
    assert min(counts) > 15


async def test_dying_engine_hands_jobs_back_though_answers_get_lost(own_crew: ServiceBench, proxy: Proxy) -> None:
    worker = await own_crew.start(redis=proxy.url, lease=30.0, engine=FakeEngine(max_sequences=8))
    for n in range(8):
        await own_crew.submit(f"j{n}", max_tokens=4000)
        await own_crew.published(f"j{n}", 3)
    proxy.cut = 0.3
    worker.engine.die("lost")

    assert await worker.task != OK
    states = [await own_crew.bench.field(f"j{n}", "state") for n in range(8)]
    assert states == [None] * 8  # all are handed back: nobody has to wait 30 s for them


async def test_sigterm_without_redis_ends_within_the_grace_time(
    own_crew: ServiceBench, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.running.LAST_WORDS_SECONDS", 0.5)
    worker = await own_crew.start(grace=0.3, lease=1.0)
    await own_crew.submit("a", max_tokens=4000)
    await own_crew.published("a", 3)
    own_server.stop(kill=True)
    await own_crew.until(lambda: not worker.ready, "readiness to turn false")
    began = time.monotonic()

    assert await worker.stop() == OK
    assert time.monotonic() - began < 0.3 + 0.5 + 2.0
