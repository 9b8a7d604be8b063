"""Whole loads against real servers, and workers with an engine's stand-in: figures, failures, Ctrl-C, readers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from redis.asyncio import Redis

from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.conftest import leftovers
from tests.gllm.scribe import Scribe
from tests.servers import Server, first_kind
from tests.worker.fake_engine import FakeEngine
from tests.worker.queue_bench import QueueBench, until
from tests.worker.service_bench import ServiceBench
from worker.load.arrivals import constant
from worker.load.figures import figures
from worker.load.reader import SHORT_SECONDS, Reader
from worker.load.record import Record
from worker.load.run import Load, Options
from worker.load.work import Drawn, Prefix, Span, Vocabulary, Work, timed

SHAPE = Drawn(Span(8, 20), Span(5, 5), Prefix(4, 2), seed=0)


@pytest.fixture
def server_kind() -> str:
    """One kind is enough where the client is what is tested."""
    return first_kind()


def options(bench: QueueBench, url: str, **more: Any) -> Options:
    values = {"run": "bench-t", "seed": 0, "vocabulary": Vocabulary(80, 220), "connections": 2}
    return Options(**(values | {"url": url, "queue": bench.keys.queue} | more))


def every(seconds: float, count: int) -> Iterator[Work]:
    return islice(timed(SHAPE.work(), constant, 1 / seconds, 0), count)


async def run(load: Load) -> None:
    async with asyncio.timeout(20):
        await load.run()


def outcomes(load: Load) -> dict[str, int]:
    return figures(load.records, load.began, load.finished).outcomes


async def test_open_load_counts_every_token_and_one_failure_among_good_jobs(crew: ServiceBench) -> None:
    engine = FakeEngine(step_seconds=0.005, max_sequences=64)
    engine.refuse["bench-t-3"] = ("invalid", "broken on purpose")
    await crew.start(engine=engine)
    load = Load(options(crew.bench, crew.url), every(0.005, 20))
    await run(load)
    found = figures(load.records, load.began, load.finished)
    assert (found.outcomes, found.tokens, load.open) == ({"length": 19, "error invalid": 1}, 19 * 5, 0)
    assert found.prompt_tokens == sum(r.work.prompt_tokens for r in load.records if r.well)
    assert found.latencies["inter_token"].count == 19 * 4
    assert "broken on purpose" in load.records[3].message
    sent = {request.id: len(request.tokens) for request in engine.added}
    assert sent == {record.id: record.work.prompt_tokens for record in load.records}
    assert len({request.cache_salt for request in engine.added}) == 1
    await crew.workers[0].stop()
    await until(lambda: _none_left(crew.bench.redis, crew.url, crew.bench.keys), "an empty queue")


async def _none_left(_: Redis, url: str, keys: Keys) -> bool:
    with connect_sync(url) as client:
        return leftovers(client, keys) == []


async def test_slow_queue_does_not_slow_its_load_and_latencies_count_from_when_jobs_were_due(
    crew: ServiceBench,
) -> None:
    engine = FakeEngine(max_sequences=1)
    engine.go.clear()
    await crew.start(engine=engine)
    load = Load(options(crew.bench, crew.url), every(0.01, 10))
    running = asyncio.create_task(run(load))
    await crew.until(lambda: len(load.records) == 10 and all(r.accepted for r in load.records), "all submitted")
    engine.go.set()
    await running
    last = load.records[-1]
    assert last.due - load.began == pytest.approx(0.09)
    assert last.first
    assert last.first > last.due
    assert outcomes(load) == {"length": 10}


async def test_closed_load_has_so_many_jobs_at_a_time_and_ends_after_its_number(crew: ServiceBench) -> None:
    engine = FakeEngine(step_seconds=0.002, max_sequences=64)
    await crew.start(engine=engine)
    load = Load(options(crew.bench, crew.url, clients=3, jobs=12), SHAPE.work())
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, load.open)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await run(load)
    watching.cancel()
    assert (len(load.records), most, outcomes(load)) == (12, 3, {"length": 12})


async def test_load_ends_when_its_time_is_over(crew: ServiceBench) -> None:
    await crew.start(engine=FakeEngine(max_sequences=64))
    load = Load(options(crew.bench, crew.url, seconds=0.2), timed(SHAPE.work(), constant, 50, 0))
    await run(load)
    assert len(load.records) == 11
    assert outcomes(load) == {"length": 11}


async def test_stopped_load_cancels_what_is_open_and_keeps_what_ended(crew: ServiceBench) -> None:
    shape = Drawn(Span(8, 8), Span(1000, 1000), Prefix(), 0)
    engine = FakeEngine(step_seconds=0.01, max_sequences=2)
    await crew.start(engine=engine)
    load = Load(options(crew.bench, crew.url), islice(timed(shape.work(), constant, 100, 0), 6))
    running = asyncio.create_task(run(load))
    await crew.until(lambda: sum(record.first is not None for record in load.records) == 2, "two running jobs")
    load.stop.set()
    await running
    assert (outcomes(load), load.interrupted) == ({"cancelled": len(load.records)}, True)
    assert sum(record.tokens for record in load.records) > 0


async def test_silent_jobs_are_given_up_and_cancelled(bench: QueueBench, redis_url: str) -> None:
    load = Load(options(bench, redis_url, timeout=0.3), every(0.01, 2))
    await run(load)
    assert outcomes(load) == {"timeout": 2}
    assert await bench.redis.exists(*(bench.keys.cancel(record.id) for record in load.records)) == 2


# --- readers ---


async def read_beside_a_silent_one(
    server: Server, keys: Keys, then: Callable[[Reader], Awaitable[object]]
) -> tuple[float, Reader]:
    """Seconds from the first event of a reply to its reading, on a connection that waits for another reply."""
    reader = Reader(server.url, keys, patience=5.0)
    work = Work(0, 0.0, (("x", 4),), 4)
    reader.add(Record("silent", work, 0.0))
    running = asyncio.create_task(reader.run())
    try:
        await until(lambda: _blocked(server), "a blocked read")
        await then(reader)
        record = Record("b", work, 0.0)
        reader.add(record)
        with connect_sync(server.url) as client:
            began = time.monotonic()
            scribe = Scribe(client, keys, "b")
            scribe.tokens(0, 0, [1], "x")
            scribe.error("internal", "enough")
        async with asyncio.timeout(10):
            await record.done.wait()
        assert record.first
        return record.first - began, reader
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _blocked(server: Server) -> bool:
    with connect_sync(server.url) as client:
        return client.info("clients")["blocked_clients"] == 1  # type: ignore[index]


async def test_added_reply_does_not_wait_for_the_blocked_read_of_others(own_server: Server, keys: Keys) -> None:
    async def nothing(_: Reader) -> None: ...

    seconds, reader = await read_beside_a_silent_one(own_server, Keys("q"), nothing)
    assert (seconds < 1.0, len(reader)) == (True, 1)


async def test_reader_that_may_wake_nobody_reads_in_short_turns(own_server: Server) -> None:
    with connect_sync(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-client|id", "-client|unblock")
    reader = Reader(own_server.url, Keys("q"), patience=5.0)
    reader.add(Record("silent", Work(0, 0.0, (("x", 4),), 4), 0.0))
    running = asyncio.create_task(reader.run())
    await until(lambda: _is_short(reader), "short turns")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _is_short(reader: Reader) -> bool:
    return reader._block == SHORT_SECONDS


async def test_reader_survives_a_restart_of_the_server(own_server: Server) -> None:
    async def restart(_: Reader) -> None:
        own_server.stop(kill=True)
        own_server.start()
        await until(lambda: _blocked(own_server), "a blocked read again")

    seconds, _ = await read_beside_a_silent_one(own_server, Keys("q"), restart)
    assert seconds < 1.0


async def test_reader_compares_what_another_server_has_with_what_it_read(own_server: Server) -> None:
    reader, keys = Reader(own_server.url, Keys("q"), patience=5.0), Keys("q")
    record = Record("b", Work(0, 0.0, (("x", 4),), 4), 0.0)
    reader.add(record)
    running = asyncio.create_task(reader.run())
    try:
        for token in (2, 9):
            with connect_sync(own_server.url) as client:
                scribe = Scribe(client, keys, "b")
                scribe.tokens(0, 0, [1], "x")
                scribe.tokens(1, 1, [token], "y")
            await until(lambda: _read(record, 2), "both tokens")
            if token == 2:
                own_server.stop(kill=True)
                own_server.start()
        async with asyncio.timeout(10):
            await record.done.wait()
        assert (record.outcome, record.tokens) == ("Rewound", 2)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _read(record: Record, count: int) -> bool:
    return record.tokens == count
