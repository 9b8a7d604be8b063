"""The Redis users of docs/: a worker and a producer run with exactly these rights, and with no others."""

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from redis.asyncio import Redis

import gllm
from gllm.connection import connect
from gllm.keys import Keys
from tests.docs.pages import ROOT, Page
from tests.servers import Server
from tests.worker.fake_engine import FakeEngine
from tests.worker.queue_bench import QueueBench, until
from tests.worker.service_bench import ServiceBench
from worker.cli import main

USERS = [line for page in ("operations", "protocol") for line in Page(f"docs/{page}.md").blocks("acl")]
KEYS = Keys("chat")
LEASE = 0.2
# What the worker says to Redis outside its scripts.
PLAIN = {"eval", "evalsha", "xrange", "xread", "client|setname"}


@pytest.fixture
async def admin(own_server: Server) -> AsyncIterator[Redis]:
    """The default user of a server that has the users of the pages too."""
    client = connect(own_server.url)
    for line in USERS:
        await client.execute_command("ACL", "SETUSER", *line.split()[1:])
    yield client
    await client.aclose()


@pytest.fixture
async def guarded_crew(admin: Redis, own_server: Server) -> AsyncIterator[ServiceBench]:
    """Workers that log in as the worker's user."""
    crew = ServiceBench(QueueBench(admin, KEYS), url_of(own_server, "gllm-worker"))
    yield crew
    await crew.close()


def url_of(server: Server, user: str) -> str:
    return server.url.replace("://", f"://{user}:CHANGE-ME@")


async def refused(admin: Redis) -> list[Any]:
    """What users were refused, but for the library's name, which is set for people's convenience only."""
    log = await admin.execute_command("ACL", "LOG")
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in log]
    return [entry for entry in entries if b"setinfo" not in entry[b"object"]]


async def test_worker_runs_with_the_rights_of_the_operations_page(guarded_crew: ServiceBench, admin: Redis) -> None:
    """A whole life: new, delayed, cancelled, wrong and unwanted jobs, a death, a takeover, a lost script, a drain."""
    crew = guarded_crew
    first = await crew.start(lease=LEASE, engine=FakeEngine(step_seconds=0.01))
    await crew.submit("long", max_tokens=60)
    await crew.submit("later", entry={"not_before": (await now_ms(admin)) + 300})
    await crew.published("long", 5)
    await first.kill()
    await admin.script_flush()
    second = await crew.start(lease=LEASE, grace=0.0, engine=FakeEngine(step_seconds=0.01))
    assert len((await crew.reply("long")).resumes) == 1
    await crew.submit("malformed", entry={"deadline": "soon"})
    await crew.reply("malformed")
    await crew.submit("endless", max_tokens=3000)
    await crew.published("endless", 3)
    await admin.set(KEYS.cancel("endless"), 1, ex=60)
    assert (await crew.reply("endless")).end.finish_reason == "cancelled"
    await crew.reply("later")
    await until(lambda: reaped(admin, first.service.name), "the end of the dead worker's consumer")
    await crew.submit("unfinished", max_tokens=3000)
    await crew.published("unfinished", 3)
    assert await second.stop() == 0
    assert await crew.bench.field("unfinished", "state") is None
    assert await refused(admin) == []


async def reaped(admin: Redis, worker: str) -> bool:
    consumers = await admin.xinfo_consumers(KEYS.jobs("normal", 0), "workers")
    return worker.encode() not in [consumer["name"] for consumer in consumers]


async def now_ms(admin: Redis) -> int:
    seconds, micros = await admin.time()
    return seconds * 1000 + micros // 1000


def test_rights_of_the_worker_are_what_its_scripts_use() -> None:
    """No more and no fewer; requeue is for people."""
    text = (ROOT / "worker" / "scripts.py").read_text()
    names = {"common", *re.findall(r'"(\w+)"', " ".join(re.findall(r"Script\((.*?)\)", text)))} - {"requeue"}
    used = set(PLAIN)
    for name in names:
        lua = (ROOT / "worker" / "lua" / f"{name}.lua").read_text()
        for command, sub in re.findall(r"\b(?:redis\.call|own)\('([A-Z]+)'(?:, '([A-Z]+)')?", lua):
            used.add(f"{command}|{sub}".lower() if command in ("XGROUP", "XINFO") else command.lower())
    (line,) = [line for line in USERS if "gllm-worker" in line]
    assert {word[1:] for word in line.split() if word.startswith("+")} == used


async def test_producer_has_the_rights_of_the_protocol_page(
    guarded_crew: ServiceBench, admin: Redis, own_server: Server, example: Any
) -> None:
    worker = await guarded_crew.start(engine=FakeEngine(step_seconds=0.01))
    url = url_of(own_server, "gllm-producer")
    async with gllm.Client(url, "chat", max_queue=10) as client:
        long = await client.submit(prompt="hello", max_tokens=3000, deadline=timedelta(minutes=1))
        await guarded_crew.published(long, 3)
        assert await client.cancel(long)
        assert (await client.result(long)).finish_reason == "cancelled"
        assert not await client.cancel(long)
        later = await client.submit(prompt="hello", not_before=timedelta(minutes=1))
        await until(lambda: admin.zcard(KEYS.delayed), "a delayed job")
        assert await client.cancel(later)
        await admin.delete(KEYS.out(long))
        with pytest.raises(gllm.ReplyExpired):
            await client.result(long)
    producer = example.Producer(url, "chat")
    await asyncio.to_thread(producer.submit, {"prompt": "hello", "max_tokens": 3}, "plain", seconds=60)
    assert len(await asyncio.to_thread(lambda: "".join(producer.stream("plain")))) == 3
    await asyncio.to_thread(producer.cancel, "plain")
    assert len(worker.engine.added) == 2
    assert await refused(admin) == []


COMMANDS = (
    "ps",
    "queue",
    "show stuck",
    "show --events ended",
    "cancel endless",
    "dead ls",
    "dead show stuck",
    "dead retry stuck",
    "dead purge --all --yes",
    "doctor",
)


async def test_operator_has_the_rights_of_the_operations_page(
    guarded_crew: ServiceBench, admin: Redis, own_server: Server
) -> None:
    await guarded_crew.start(engine=FakeEngine(step_seconds=0.01))
    await guarded_crew.submit("ended")
    await guarded_crew.submit("endless", max_tokens=3000)
    await guarded_crew.submit("stuck", entry={"deadline": "soon"})
    await guarded_crew.submit("wrong", entry={"deadline": "soon"})
    for job_id in ("ended", "stuck", "wrong"):
        await guarded_crew.reply(job_id)
    await guarded_crew.published("endless", 3)
    place = ["--redis", url_of(own_server, "gllm-operator"), "--queue", "chat"]
    runner = CliRunner()
    for command in COMMANDS:
        done = await asyncio.to_thread(runner.invoke, main, [*command.split(), *place])
        assert done.exit_code == 0, f"{command}: {done.output}"
    assert "may do what a worker does" in done.output
    assert (await guarded_crew.reply("endless")).end.finish_reason == "cancelled"
    assert await refused(admin) == []


FORBIDDEN = (
    f"XREAD STREAMS {KEYS.jobs('normal', 0)} 0",
    f"XRANGE {KEYS.jobs('normal', 0)} - +",
    f"XDEL {KEYS.jobs('normal', 0)} 1-1",
    f"XTRIM {KEYS.jobs('normal', 0)} MAXLEN 0",
    f"XGROUP DESTROY {KEYS.jobs('normal', 0)} workers",
    f"XREADGROUP GROUP workers me STREAMS {KEYS.jobs('normal', 0)} >",
    f"DEL {KEYS.jobs('normal', 0)}",
    f"SET {KEYS.jobs('normal', 0)} 1",
    f"XADD {KEYS.out('a')} * d 1",
    f"DEL {KEYS.out('a')}",
    f"HSET {KEYS.job('a')} state ended",
    f"HGETALL {KEYS.job('a')}",
    f"HSET {KEYS.meta} shards 2",
    f"DEL {KEYS.meta}",
    f"GET {KEYS.cancel('a')}",
    f"ZADD {KEYS.delayed} 1 a",
    f"XADD {KEYS.dead} * id a",
    f"XREAD STREAMS {KEYS.dead} 0",
    f"XADD {Keys('other').jobs('normal', 0)} * id a",
    f"XREAD STREAMS {Keys('other').out('a')} 0",
    "EVAL return 0",
    "SCRIPT FLUSH",
    "FLUSHALL",
    "KEYS *",
    "SCAN 0",
    "CONFIG GET *",
    "CLIENT LIST",
    "ACL LIST",
    "PUBLISH news 1",
    "SHUTDOWN",
)


ELSEWHERE = (
    f"HGET {Keys('other').meta} model",
    f"XRANGE {Keys('other').jobs('normal', 0)} - +",
    "GET other",
    "FLUSHALL",
    "KEYS *",
    "CONFIG SET maxmemory 1",
    "ACL SETUSER me",
    "SHUTDOWN",
)


async def test_users_have_no_other_rights(admin: Redis) -> None:
    async def allowed(user: str, command: str) -> bool:
        return await admin.execute_command("ACL", "DRYRUN", user, *command.split()) == b"OK"

    assert await allowed("gllm-producer", f"XADD {KEYS.jobs('normal', 0)} * id a")
    assert await allowed("gllm-producer", "WAIT 1 2000")
    assert [command for command in FORBIDDEN if await allowed("gllm-producer", command)] == []
    for user in ("gllm-worker", "gllm-operator"):
        assert [command for command in ELSEWHERE if await allowed(user, command)] == []
