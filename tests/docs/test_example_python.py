"""examples/producer.py: a producer without our client, run as people run it, against real workers and servers."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from gllm.keys import Keys
from tests.docs.pages import ROOT
from tests.proxy import Proxy
from tests.worker.fake_engine import FIRST_BYTE, FakeEngine, script, text_of
from tests.worker.service_bench import ServiceBench

EXAMPLE = ROOT / "examples" / "producer.py"
PROMPT = [FIRST_BYTE + byte for byte in b"hello"]
SLOW = 0.02  # seconds a token: time to look at a reply in the middle


@pytest.fixture
async def proxy(redis: Redis) -> AsyncIterator[Proxy]:
    place = redis.connection_pool.connection_kwargs
    async with Proxy(place["host"], place["port"]) as proxy:
        yield proxy


async def produce(url: str, queue: str, *flags: str, tokens: int = 40) -> Process:
    command = [sys.executable, str(EXAMPLE), "hello", "--redis", url, "--queue", queue, "--max-tokens", str(tokens)]
    return await asyncio.create_subprocess_exec(*command, *flags, stdout=PIPE, stderr=PIPE)


async def output(process: Process) -> str:
    async with asyncio.timeout(30):
        stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    return stdout.decode()


async def test_python_example_reads_through_lost_connections_and_takes_an_id_once(
    crew: ServiceBench, keys: Keys, proxy: Proxy
) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=SLOW))
    first = await produce(proxy.url, keys.queue, "--id", "story")
    for count in (5, 20):
        await crew.published("story", count)
        proxy.loadings, proxy.loading = 0, True  # the server that answers next is still reading its data
        proxy.drop_all()
        await crew.until(lambda: proxy.loadings, "a command while the server loads")
        proxy.loading = False
    again = await produce(proxy.url, keys.queue, "--id", "story")

    whole = text_of(script(PROMPT, 40)) + "\n"
    assert await output(first) == whole
    assert await output(again) == whole
    assert len(worker.engine.added) == 1


async def test_python_example_reads_on_when_a_worker_dies(crew: ServiceBench, keys: Keys, redis_url: str) -> None:
    first = await crew.start(engine=FakeEngine(step_seconds=SLOW))
    reading = await produce(redis_url, keys.queue, "--id", "story")
    await crew.published("story", 10)
    await crew.start()
    await first.kill()

    assert await output(reading) == text_of(script(PROMPT, 40)) + "\n"
    assert len((await crew.reply("story")).resumes) == 1


async def test_python_example_cancels_at_ctrl_c_and_keeps_a_deadline(
    crew: ServiceBench, keys: Keys, redis_url: str
) -> None:
    await crew.start(engine=FakeEngine(step_seconds=SLOW))
    unwanted = await produce(redis_url, keys.queue, "--id", "unwanted", tokens=4000)
    late = await produce(redis_url, keys.queue, "--id", "late", "--deadline", "1", tokens=4000)
    await crew.published("unwanted", 3)
    assert unwanted.stdout is not None
    await unwanted.stdout.readexactly(1)
    unwanted.send_signal(signal.SIGINT)

    await output(unwanted)
    assert (await crew.reply("unwanted")).end.finish_reason == "cancelled"
    said = await output(late)
    reply = await crew.reply("late")
    assert reply.end.finish_reason == "deadline"
    assert said == reply.text + "\n"


async def test_python_example_says_what_went_wrong(
    crew: ServiceBench, keys: Keys, redis: Redis, redis_url: str, example: Any
) -> None:
    await crew.start()
    producer = example.Producer(redis_url, keys.queue)

    def read(job_id: str, **job: Any) -> str:
        producer.submit(job, job_id)
        return "".join(producer.stream(job_id))

    with pytest.raises(RuntimeError, match="invalid: temprature: unknown field, got 0"):
        await asyncio.to_thread(read, "wrong", prompt="hello", temprature=0)
    assert await asyncio.to_thread(read, "short", prompt="hello", max_tokens=2) == text_of(script(PROMPT, 2))
    await redis.delete(keys.out("short"))
    with pytest.raises(RuntimeError, match="no longer kept"):
        await asyncio.to_thread(read, "short", prompt="hello", max_tokens=2)
    await asyncio.to_thread(producer.cancel, "short")
    assert await redis.exists(keys.cancel("short")) == 0


async def test_python_example_ends_with_one_line(crew: ServiceBench, keys: Keys, redis_url: str) -> None:
    await crew.start()
    refused = await produce(redis_url, keys.queue, tokens=-1)
    waiting = await produce("redis://127.0.0.1:1/0", keys.queue)
    assert waiting.stderr is not None
    assert re.match(rb"Redis: .*127.0.0.1:1.*; trying on for 60 s\n", await waiting.stderr.readline())
    waiting.send_signal(signal.SIGINT)
    async with asyncio.timeout(30):
        _, refusal = await refused.communicate()
        rest = await waiting.communicate()
    assert (refused.returncode, refusal.count(b"\n")) == (1, 1)
    assert refusal.startswith(b"invalid: max_tokens: ")
    assert (waiting.returncode, rest) == (130, (b"", b""))


def tokens(first: int, at: int, ids: list[int], text: str) -> dict[str, Any]:
    return {"type": "tokens", "from": first, "at": at, "ids": ids, "text": text}


def done(text: str, count: int) -> dict[str, Any]:
    return {"type": "done", "text": text, "usage": {"completion_tokens": count}}


def test_python_example_drops_what_comes_again(example: Any) -> None:
    reply = example.Reply()
    first, second = tokens(0, 0, [7, 8, 9], "né🙂"), tokens(2, 2, [9, 10, 11], "🙂 ß")
    texts = [reply.add(event) for event in (first, second, first, tokens(0, 0, [7, 8, 9, 10, 11, 12], "né🙂 ßx"))]
    assert texts == ["né🙂", " ß", "", "x"]
    assert reply.ids == [7, 8, 9, 10, 11, 12]
    assert reply.add(done("!", 6)) == "!"
    assert reply.ended


@pytest.mark.parametrize(
    "event", [tokens(4, 3, [1], "x"), tokens(1, 1, [5], "x"), tokens(2, 2, [5, 6], "xy"), done("", 4)]
)
def test_python_example_refuses_a_hole_and_another_reply(example: Any, event: dict[str, Any]) -> None:
    reply = example.Reply()
    reply.add(tokens(0, 0, [7, 8, 9], "abc"))
    with pytest.raises(RuntimeError, match=r"hole|other tokens"):
        reply.add(event)
