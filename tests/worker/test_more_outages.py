"""More that a server may do to its workers: cut lines, forget everything, hold keys of other types."""

import asyncio
import time
from collections.abc import Iterator

import pytest
import structlog

from tests.servers import Server, first_kind
from tests.worker.fake_engine import FakeEngine, script
from tests.worker.service_bench import ServiceBench
from worker import logs
from worker.service import FAILED, OK

HELLO = [3 + byte for byte in b"hello"]


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough here: what differs between them is tested with the scripts."""
    return first_kind()


@pytest.fixture
def log_lines() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def serious(lines: list[structlog.typing.EventDict]) -> list[structlog.typing.EventDict]:
    return [line for line in lines if line["log_level"] in ("warning", "error", "critical")]


async def test_job_that_takes_several_leases_runs_once_beside_an_idle_worker(own_crew: ServiceBench) -> None:
    """RS-H1: its owner keeps the lease alive, so nobody runs it a second time."""
    engines = [FakeEngine(step_seconds=0.01) for _ in range(2)]
    for engine in engines:
        await own_crew.start(engine=engine, lease=0.6)
    await own_crew.submit("a", max_tokens=180)

    reply = await own_crew.reply("a")

    assert (reply.ids, reply.resumes) == (script(HELLO, 180), [])
    assert sum(len(engine.added) for engine in engines) == 1


async def test_lines_that_the_server_closes_when_they_are_idle_make_no_trouble(
    own_crew: ServiceBench, log_lines: list[structlog.typing.EventDict]
) -> None:
    """RS-H5 in another shape: with a lease of a minute, renewals are further apart than a server's `timeout`."""
    await own_crew.bench.redis.config_set("timeout", 1)
    worker = await own_crew.start(lease=6.0)
    quiet_until = time.monotonic() + 3.5
    await own_crew.until(lambda: time.monotonic() > quiet_until, "two renewals on lines that were closed")
    await own_crew.submit("a")

    assert (await own_crew.reply("a")).ids == script(HELLO, 8)
    assert serious(log_lines) == []
    assert worker.ready


async def test_server_that_drops_every_connection_again_and_again_costs_no_token(own_crew: ServiceBench) -> None:
    await own_crew.start(engine=FakeEngine(step_seconds=0.005), lease=3.0)
    await own_crew.submit("a", max_tokens=300)
    for count in (5, 60, 120, 180):
        await own_crew.published("a", count)
        await own_crew.bench.redis.client_kill_filter(_type="normal", skipme=True)

    assert (await own_crew.reply("a")).ids == script(HELLO, 300)
    await own_crew.bench.clear_streams()


async def test_server_that_forgets_everything_in_the_middle_gets_a_new_queue(
    own_crew: ServiceBench, own_server: Server
) -> None:
    worker = await own_crew.start(engine=FakeEngine(step_seconds=0.005))
    await own_crew.submit("a", max_tokens=4000)
    await own_crew.published("a", 5)
    own_server.stop(kill=True)
    own_server.start()
    await own_crew.until(lambda: "a" in worker.engine.cancelled, "the job to be dropped")
    await own_crew.submit("b")

    assert (await own_crew.reply("b")).ids == script(HELLO, 8)
    assert await own_crew.bench.redis.hget(own_crew.bench.keys.meta, "model") == b"digest"
    assert await worker.stop() == OK


@pytest.mark.parametrize("key", ["bell", "delayed", "dead"])
async def test_worker_serves_on_beside_a_key_of_another_type_and_says_so_once(
    own_crew: ServiceBench, log_lines: list[structlog.typing.EventDict], key: str
) -> None:
    await own_crew.bench.redis.set(own_crew.bench.keys.base + key, "text")
    worker = await own_crew.start()
    for n in range(3):
        await own_crew.submit(f"j{n}")
        assert (await own_crew.reply(f"j{n}")).ids == script(HELLO, 8)
    await own_crew.bench.submit("bad", deadline="soon")
    await own_crew.until_ended("bad")

    broken = [line["key"] for line in log_lines if line["event"] == logs.KEY_BROKEN]
    assert [text.partition(":")[0] for text in broken] == ([] if key == "dead" else [key])
    assert worker.ready
    assert await worker.stop() == OK


@pytest.mark.parametrize("key", ["workers", "meta"])
async def test_worker_ends_and_names_the_key_without_which_nobody_can_hold_a_lease(
    own_crew: ServiceBench, log_lines: list[structlog.typing.EventDict], key: str
) -> None:
    worker = await own_crew.start()
    name = own_crew.bench.keys.base + key
    await own_crew.bench.redis.set(name, "text")

    async with asyncio.timeout(10):
        assert await worker.task == FAILED
    assert name in worker.service.health.reason
    assert name in str(serious(log_lines))
