"""examples/node/producer.mjs: a producer in Node, run as people run it, against real workers and servers."""

import asyncio
import json
import shutil
import signal
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

FOLDER = ROOT / "examples" / "node"
EXAMPLE = FOLDER / "producer.mjs"
PROMPT = [FIRST_BYTE + byte for byte in b"hello"]
SLOW = 0.02  # seconds a token: time to look at a reply in the middle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="no node here"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "redis").is_dir(),
        reason="the example's library is not installed: `make examples`, or `npm install` in examples/node",
    ),
]


@pytest.fixture
async def lossy(redis: Redis) -> AsyncIterator[Proxy]:
    place = redis.connection_pool.connection_kwargs
    async with Proxy(place["host"], place["port"]) as proxy:
        yield proxy


async def start(url: str, queue: str, *flags: str, tokens: int = 40) -> Process:
    command = ["node", str(EXAMPLE), "hello", "--redis", url, "--queue", queue, "--max-tokens", str(tokens)]
    return await asyncio.create_subprocess_exec(*command, *flags, stdout=PIPE, stderr=PIPE)


async def said(process: Process, status: int = 0) -> str:
    """What it printed: the reply, or what went wrong."""
    async with asyncio.timeout(60):
        stdout, stderr = await process.communicate()
    assert process.returncode == status, stderr.decode()
    return (stderr if status else stdout).decode()


async def test_node_example_reads_through_lost_connections_and_takes_an_id_once(
    crew: ServiceBench, keys: Keys, lossy: Proxy
) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=SLOW))
    first = await start(lossy.url, keys.queue, "--id", "story")
    for count in (5, 20):
        await crew.published("story", count)
        lossy.loadings, lossy.loading = 0, True  # the server that answers next is still reading its data
        lossy.drop_all()
        await crew.until(lambda: lossy.loadings >= 5, "commands while the server loads, not only those that greet it")
        lossy.loading = False
    again = await start(lossy.url, keys.queue, "--id", "story")

    whole = text_of(script(PROMPT, 40)) + "\n"
    assert await said(first) == whole
    assert await said(again) == whole
    assert len(worker.engine.added) == 1


async def test_node_example_reads_on_when_a_worker_dies(crew: ServiceBench, keys: Keys, redis_url: str) -> None:
    first = await crew.start(engine=FakeEngine(step_seconds=SLOW))
    reading = await start(redis_url, keys.queue, "--id", "story")
    await crew.published("story", 10)
    await crew.start()
    await first.kill()

    assert await said(reading) == text_of(script(PROMPT, 40)) + "\n"
    assert len((await crew.reply("story")).resumes) == 1


async def test_node_example_cancels_at_ctrl_c_and_keeps_a_deadline(
    crew: ServiceBench, keys: Keys, redis_url: str
) -> None:
    await crew.start(engine=FakeEngine(step_seconds=SLOW))
    unwanted = await start(redis_url, keys.queue, "--id", "unwanted", tokens=4000)
    late = await start(redis_url, keys.queue, "--id", "late", "--deadline", "1.5", tokens=4000)
    assert unwanted.stdout is not None
    await unwanted.stdout.readexactly(1)
    unwanted.send_signal(signal.SIGINT)

    await said(unwanted)
    assert (await crew.reply("unwanted")).end.finish_reason == "cancelled"
    text = await said(late)
    reply = await crew.reply("late")
    assert reply.end.finish_reason == "deadline"
    assert text == reply.text + "\n"


async def write(redis: Redis, keys: Keys, job_id: str, *events: dict[str, Any]) -> None:
    """A reply as some worker may have written it, before anybody asks for it."""
    for event in events:
        await redis.xadd(keys.out(job_id), {"d": json.dumps(event)})
    await redis.expire(keys.out(job_id), 600)


def tokens(first: int, at: int, ids: list[int], text: str) -> dict[str, Any]:
    return {"type": "tokens", "from": first, "at": at, "ids": ids, "text": text}


def done(text: str, count: int) -> dict[str, Any]:
    return {"type": "done", "text": text, "usage": {"completion_tokens": count}}


FIRST, SECOND = tokens(0, 0, [7, 8, 9], "🙂né"), tokens(2, 2, [9, 10, 11], "é🙂ß")


async def test_node_example_drops_what_comes_again_by_code_points(redis: Redis, keys: Keys, redis_url: str) -> None:
    again = tokens(0, 0, [7, 8, 9, 10, 11, 12], "🙂né🙂ßx")
    await write(redis, keys, "story", FIRST, SECOND, FIRST, again, done("!", 6))
    assert await said(await start(redis_url, keys.queue, "--id", "story")) == "🙂né🙂ßx!\n"


async def test_node_example_says_what_went_wrong(crew: ServiceBench, keys: Keys, redis: Redis, redis_url: str) -> None:
    wrong = {
        "hole": (tokens(4, 3, [1], "x"), "a hole, or another reply than the one read before, at token 4"),
        "other": (tokens(1, 1, [5], "x"), "a hole, or another reply than the one read before, at token 1"),
        "short": (done("", 4), "the reply ended with other tokens than the 3 that were read"),
        "error": ({"type": "error", "code": "internal", "message": "out of order"}, "internal: out of order"),
    }
    for job_id, (event, _) in wrong.items():
        await write(redis, keys, job_id, FIRST, event)
    runs = {job_id: await start(redis_url, keys.queue, "--id", job_id) for job_id in wrong}
    assert {job_id: await said(run, 1) for job_id, run in runs.items()} == {
        job_id: f"{message}\n" for job_id, (_, message) in wrong.items()
    }

    await crew.start()
    assert await said(await start(redis_url, keys.queue, "--id", "gone", tokens=2))
    await redis.delete(keys.out("gone"))
    assert "no longer kept" in await said(await start(redis_url, keys.queue, "--id", "gone", tokens=2), 1)
    assert "--deadline: a number expected" in await said(await start(redis_url, "q", "--deadline", "soon"), 1)


async def test_node_example_does_not_wait_for_what_waiting_cannot_cure(own_server: Any, queue_name: str) -> None:
    url = own_server.url.replace("://", "://nobody:wrong@")
    assert "WRONGPASS" in await said(await start(url, queue_name), 1)
