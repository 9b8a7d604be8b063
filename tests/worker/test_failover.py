"""Failovers to older copies while workers publish and clients read: no hole and no double, or a stated error."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from gllm import Client
from gllm.protocol import TERMINAL_ENTRY_ID
from gllm.reply import Hole, ReplyExpired
from tests.servers import first_kind
from tests.worker.failover import Copy, Reader, copy_of, copy_of_queue, fail_over, restore
from tests.worker.fake_engine import FakeEngine, script, text_of
from tests.worker.service_bench import ServiceBench, Worker

HELLO = [3 + byte for byte in b"hello"]
TOKENS = 150
TRUTH = script(HELLO, TOKENS)


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough: what DUMP and RESTORE bring back is the same data on each."""
    return first_kind()


@pytest.fixture
async def client(crew: ServiceBench) -> AsyncIterator[Client]:
    async with Client(crew.url, crew.bench.keys.queue) as client:
        yield client


def engine() -> FakeEngine:
    return FakeEngine(step_seconds=0.003, max_sequences=32)


async def begin(crew: ServiceBench, client: Client, job_id: str = "a") -> Reader:
    await crew.submit(job_id, max_tokens=TOKENS)
    return Reader(client, job_id)


def check_prefix(reader: Reader) -> None:
    """Whatever happened, it was never told a token twice, out of order or with one missing before it."""
    assert reader.ids == TRUTH[: len(reader.ids)], reader.id
    assert text_of(TRUTH).startswith(reader.text), reader.id
    assert reader.error or reader.ids == TRUTH, reader.id


async def check_end(crew: ServiceBench, job_id: str = "a") -> None:
    """The stream itself has one terminal event, as its last entry."""
    await crew.until_ended(job_id)
    assert (await crew.bench.entries(job_id))[-1] == TERMINAL_ENTRY_ID
    await crew.until_async(lambda: _idle(crew), "empty streams")


async def _idle(crew: ServiceBench) -> bool:
    return not await crew.bench.redis.xlen(crew.bench.keys.jobs("normal", 0))


PARTS = {"record": ["job"], "reply": ["out"], "record and reply": ["job", "out"]}


@pytest.mark.parametrize("takeover", [False, True], ids=["same worker", "another takes over"])
@pytest.mark.parametrize("parts", PARTS)
async def test_older_copies_of_one_job_while_it_is_read(
    crew: ServiceBench, client: Client, parts: str, takeover: bool
) -> None:
    worker = await crew.start(engine=engine())
    reader = await begin(crew, client)
    names = [getattr(crew.bench.keys, part)("a") for part in PARTS[parts]]
    await reader.wait(20)
    copy = await copy_of(crew.bench.redis, *names)
    await reader.wait(60)
    if takeover:
        await worker.kill()
    await restore(crew.bench.redis, copy)
    if takeover:
        await crew.start(engine=engine())
    late = Reader(client, "a")

    await asyncio.gather(reader.end(), late.end())

    for each in (reader, late):
        check_prefix(each)
    assert reader.error is None  # it had what the copy lacks
    if parts == "reply" and not takeover:
        assert isinstance(late.error, Hole)  # the worker does not know what the stream has lost
    else:
        assert late.error is None
    await check_end(crew)


@pytest.mark.parametrize("takeover", [False, True], ids=["same worker", "another takes over"])
@pytest.mark.parametrize("part", ["job", "out"])
async def test_record_or_reply_that_is_gone_while_it_is_read(
    crew: ServiceBench, client: Client, part: str, takeover: bool
) -> None:
    worker = await crew.start(engine=engine())
    reader = await begin(crew, client)
    await reader.wait(40)
    if takeover:
        await worker.kill()
    await crew.bench.redis.delete(getattr(crew.bench.keys, part)("a"))
    if takeover:
        await crew.start(engine=engine())

    await reader.end()

    check_prefix(reader)
    assert reader.error is None
    await check_end(crew)


async def test_epoch_that_is_handed_out_twice_lets_one_of_two_live_workers_write(
    crew: ServiceBench, client: Client
) -> None:
    """The record goes back to before the claim while the first worker stalls: a second one gets the same epoch."""
    first = await crew.start(engine=engine(), lease=30.0)
    reader = await begin(crew, client)
    await reader.wait(10)
    first.engine.go.clear()
    entries = await crew.bench.redis.xpending_range(crew.bench.keys.jobs("normal", 0), "workers", "-", "+", 1)
    await crew.bench.redis.delete(crew.bench.keys.job("a"))
    second = await crew.start(engine=engine(), lease=30.0)
    await crew.bench.redis.xclaim(
        crew.bench.keys.jobs("normal", 0), "workers", "-released", 0, [entries[0]["message_id"]], justid=True
    )
    await crew.until(lambda: second.engine.added, "the job in the second engine")
    epoch = await crew.bench.field("a", "epoch")
    first.engine.go.set()

    await reader.end()

    assert epoch == "1"
    check_prefix(reader)
    assert reader.error is None
    assert await crew.bench.field("a", "worker") == second.service.name
    await check_end(crew)


async def test_end_that_got_lost_is_a_stated_error_and_comes_again_when_the_job_is_submitted_again(
    crew: ServiceBench, client: Client
) -> None:
    await crew.start(engine=engine())
    reader = await begin(crew, client)
    await reader.wait(TOKENS // 2)
    copy = await copy_of(crew.bench.redis, crew.bench.keys.out("a"))
    await reader.end()
    await restore(crew.bench.redis, copy)

    late = Reader(client, "a")
    await late.end()
    assert isinstance(late.error, ReplyExpired)
    await crew.submit("a", max_tokens=TOKENS)
    last = Reader(client, "a")
    await last.end()

    for each in (reader, late, last):
        check_prefix(each)
    assert (reader.error, last.error) == (None, None)
    await check_end(crew)


async def test_job_that_had_ended_before_the_failover_ends_again_for_those_who_still_read(
    crew: ServiceBench, client: Client
) -> None:
    await crew.start(engine=engine())
    reader = await begin(crew, client)
    await reader.wait(30)
    copy = await copy_of_queue(crew.bench.redis, crew.bench.keys)
    await reader.end()
    await fail_over(crew.bench.redis, crew.bench.keys, copy)

    late = Reader(client, "a")
    await late.end()

    for each in (reader, late):
        check_prefix(each)
        assert each.error is None
    await check_end(crew)


@pytest.mark.parametrize("seed", range(2))
async def test_whole_queue_set_back_in_the_middle_of_many_replies(
    crew: ServiceBench, client: Client, seed: int
) -> None:
    """What a failover really does: all keys go back to one moment, heartbeats, groups and pending lists among them."""
    chance = random.Random(seed)
    workers = [await crew.start(engine=engine()) for _ in range(2)]
    readers = [await begin(crew, client, f"j{n}") for n in range(12)]
    watched = chance.choice(readers)
    for _ in range(2):
        await watched.wait(len(watched.ids) + chance.randrange(5, 30))
        copy = await copy_of_queue(crew.bench.redis, crew.bench.keys)
        await watched.wait(len(watched.ids) + chance.randrange(5, 40))
        if chance.random() < 0.5:
            await workers.pop().kill()
            workers.append(await crew.start(engine=engine()))
        await fail_over(crew.bench.redis, crew.bench.keys, copy)
        readers += [Reader(client, reader.id) for reader in chance.sample(readers, 3)]

    await asyncio.gather(*(reader.end() for reader in readers))

    for reader in readers:
        check_prefix(reader)
        assert reader.error is None, reader.id
    for n in range(12):
        await check_end(crew, f"j{n}")


PLANS = [["job"], ["out"], ["job", "out"]]


@pytest.mark.parametrize("seed", range(2))
async def test_single_keys_set_back_at_random_moments(crew: ServiceBench, client: Client, seed: int) -> None:
    """Worse than a failover can be: keys of one job go back to different moments, some to nothing at all."""
    chance = random.Random(100 + seed)
    workers = [await crew.start(engine=engine()) for _ in range(2)]
    readers = [await begin(crew, client, f"j{n}") for n in range(16)]
    disturbed = [asyncio.create_task(_disturb(crew, reader, random.Random(chance.random()))) for reader in readers]
    await readers[0].wait(chance.randrange(20, 80))
    await _replace(crew, workers)
    await asyncio.gather(*disturbed)
    late = [Reader(client, reader.id) for reader in readers]

    for each in (*readers, *late):
        await each.end()
        check_prefix(each)
    assert all(reader.error is None for reader in readers)
    for n in range(16):
        await check_end(crew, f"j{n}")


async def _disturb(crew: ServiceBench, reader: Reader, chance: random.Random) -> None:
    """Copy some keys of a job at one moment, and bring them back at a later one, before the job's end."""
    names = [getattr(crew.bench.keys, part)(reader.id) for part in chance.choice(PLANS)]
    await reader.wait(chance.randrange(TOKENS // 2))
    copy: Copy = dict.fromkeys(names) if chance.random() < 0.2 else await copy_of(crew.bench.redis, *names)
    await reader.wait(len(reader.ids) + chance.randrange(1, 30))
    if len(reader.ids) < TOKENS - 20:
        await restore(crew.bench.redis, copy)


async def _replace(crew: ServiceBench, workers: list[Worker]) -> None:
    await workers.pop(0).kill()
    workers.append(await crew.start(engine=engine()))
