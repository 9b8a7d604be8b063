"""examples/producer.sh: a producer of nothing but redis-cli, against real workers and servers."""

import asyncio
import os
import shutil
import signal
from asyncio.subprocess import PIPE, Process

import pytest
from redis.asyncio import Redis

from gllm.connection import connect
from gllm.keys import Keys
from gllm.protocol import Done, Error, ReplyEvent, Start, decode_event
from tests.docs.pages import ROOT, Page
from tests.proxy import Proxy
from tests.servers import Server
from tests.worker.fake_engine import FakeEngine
from tests.worker.queue_bench import QueueBench
from tests.worker.service_bench import ServiceBench

EXAMPLE = ROOT / "examples" / "producer.sh"
SLOW = 0.02  # seconds a token: time to look at a reply in the middle

pytestmark = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli here")


async def test_commands_of_the_protocol_page_work(own_server: Server) -> None:
    """Word for word, in one shell, where redis-cli finds the server of the test."""
    commands = "\n".join(Page("docs/protocol.md").blocks("sh"))
    assert all(word in commands for word in ("XADD", "XREAD", "SET"))
    async with connect(own_server.url) as redis:
        crew = ServiceBench(QueueBench(redis, Keys("default")), own_server.url)
        await crew.start()
        local = f'set -eu\nredis-cli() {{ command redis-cli -p {own_server.port} -e "$@"; }}\n{commands}'
        shell = await asyncio.create_subprocess_exec("bash", "-c", local, stdout=PIPE)
        async with asyncio.timeout(30):
            said, _ = await shell.communicate()
        assert shell.returncode == 0
        assert b'"type":"start"' in said
        assert (await crew.reply("job1")).end.finish_reason in ("length", "cancelled")
        await crew.close()


class Shell:
    """Runs the example on one queue."""

    def __init__(self, url: str, queue: str) -> None:
        self._environment = {**os.environ, "REDIS_URL": url, "QUEUE": queue}

    async def start(self, *words: str) -> Process:
        """In a process group of its own, as a terminal does it, so that an interrupt reaches redis-cli too."""
        command = ["sh", str(EXAMPLE), *words]
        return await asyncio.create_subprocess_exec(
            *command, env=self._environment, stdout=PIPE, stderr=PIPE, start_new_session=True
        )

    async def run(self, *words: str, status: int = 0) -> tuple[list[ReplyEvent], str]:
        return await self.end(await self.start(*words), status)

    async def end(self, process: Process, status: int = 0) -> tuple[list[ReplyEvent], str]:
        """The events that it printed, and what it said beside."""
        async with asyncio.timeout(30):
            stdout, stderr = await process.communicate()
        assert process.returncode == status, stderr.decode()
        return [decode_event(line) for line in stdout.splitlines()], stderr.decode()


async def test_shell_example_goes_on_after_an_interruption(crew: ServiceBench, keys: Keys, redis_url: str) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=SLOW))
    shell = Shell(redis_url, keys.queue)
    for _ in range(2):
        await shell.run("submit", "story", '{"prompt":"hello","max_tokens":50}')
    reading = await shell.start("read", "story")
    await crew.published("story", 10)
    assert reading.stdout is not None
    begun = [decode_event(await reading.stdout.readline()) for _ in range(5)]
    os.killpg(reading.pid, signal.SIGINT)
    more, said = await shell.end(reading, status=130)
    words = said.split()
    rest, _ = await shell.run(*words[words.index("read") :])

    seen = begun + more
    rest = rest[1:] if rest[0] == seen[-1] else rest  # an interrupt between an event and the note of its place
    assert seen + rest == (await crew.reply("story")).events
    assert rest
    assert len(worker.engine.added) == 1


async def test_shell_example_reads_through_lost_connections(crew: ServiceBench, keys: Keys, redis: Redis) -> None:
    await crew.start(engine=FakeEngine(step_seconds=SLOW))
    place = redis.connection_pool.connection_kwargs
    async with Proxy(place["host"], place["port"]) as proxy:
        shell = Shell(proxy.url, keys.queue)
        await shell.run("submit", "story", '{"prompt":"hello","max_tokens":50}')
        reading = await shell.start("read", "story")
        await crew.published("story", 10)
        proxy.loading = True
        proxy.drop_all()
        await crew.until(lambda: proxy.loadings, "a command while the server loads")
        proxy.loading = False
        events, _ = await shell.end(reading)
    assert events == (await crew.reply("story")).events


async def test_shell_example_cancels_and_sets_a_deadline(crew: ServiceBench, keys: Keys, redis_url: str) -> None:
    await crew.start(engine=FakeEngine(step_seconds=SLOW))
    shell = Shell(redis_url, keys.queue)
    await shell.run("submit", "unwanted", '{"prompt":"hello","max_tokens":4000}')
    await shell.run("submit", "late", '{"prompt":"hello","max_tokens":4000}', "deadline", "1")
    await crew.published("unwanted", 3)
    await shell.run("cancel", "unwanted")

    events, _ = await shell.run("read", "unwanted")
    assert isinstance(events[0], Start)
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "cancelled"
    (event,), _ = await shell.run("read", "late")
    assert isinstance(event, Done)
    assert event.finish_reason == "deadline"


async def test_shell_example_says_what_went_wrong(crew: ServiceBench, keys: Keys, redis: Redis, redis_url: str) -> None:
    await crew.start()
    shell = Shell(redis_url, keys.queue)
    await shell.run("submit", "wrong", '{"prompt":"hello","temprature":0}')
    (event,), _ = await shell.run("read", "wrong")
    assert isinstance(event, Error)
    assert event.code == "invalid"
    await redis.delete(keys.out("wrong"))
    _, said = await shell.run("read", "wrong", status=1)
    assert "no longer kept" in said
    _, usage = await shell.run(status=2)
    assert "submit ID JSON" in usage
