"""`gllm ps` and `gllm queue` against real servers, with jobs that real workers' scripts have handled."""

import os
import re
import time

import redis as redis_sync

from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.servers import Server
from tests.worker.command_bench import Commands
from tests.worker.fake_engine import FakeEngine
from tests.worker.queue_bench import QueueBench, finish, now_ms, publish
from tests.worker.service_bench import ServiceBench

EVIL = "x\x1b[31m\x9b2J\u202e"


async def states(commands: Commands) -> dict[str, str]:
    return {job["id"]: job["state"] for job in commands.json("ps")["jobs"]}


# --- ps ---


async def test_ps_of_a_queue_that_nobody_has_used(commands: Commands) -> None:
    assert commands.text("ps") == f"queue {commands.environment['GLLM_QUEUE']}: 0 running, 0 waiting\n\nno workers\n"
    shown = commands.json("ps")
    assert (shown["jobs"], shown["workers"], shown["waiting"]) == ([], [], 0)


async def test_ps_shows_jobs_of_every_state_in_the_order_of_their_turn(bench: QueueBench, commands: Commands) -> None:
    first, second = await bench.worker("w1", lease=20), await bench.worker("w2", lease=20)
    for job_id in ("runs", "dies", "back"):
        await bench.submit(job_id)
    runs, _ = await bench.claimed(first, 2)
    (back,) = await bench.claimed(second, 1)
    await publish(first, runs, 0, 7)
    await second.release([back])
    (back,) = await bench.claimed(second, 1)
    await second.release([back], frozenset({"back"}))
    await bench.submit("later", not_before=await now_ms(bench.redis) + 3_600_000)
    assert await bench.claimed(second, 0) == []  # a claim of nothing still looks at what is due
    await bench.submit("new", tenant=EVIL)
    await bench.submit("hurry", "high")
    await bench.submit("runs", "low")
    await bench.redis.set(bench.keys.cancel("new"), 1, ex=60)
    await bench.redis.zadd(bench.keys.workers, {"w1": 1})
    shown = commands.json("ps")
    assert [(job["id"], job["state"]) for job in shown["jobs"]] == [
        ("runs", "orphaned"), ("dies", "orphaned"), ("back", "released"), ("hurry", "waiting"), ("later", "waiting"),
        ("new", "waiting"), ("runs", "duplicate"),
    ]  # fmt: skip
    assert [shown[name] for name in ("held", "orphaned", "released", "waiting")] == [2, 2, 1, 4]
    job = {job["id"]: job for job in reversed(shown["jobs"])}
    assert (job["runs"]["tokens"], job["runs"]["worker"], job["runs"]["claims"]) == (7, "w1", 1)
    assert (job["back"]["attempts"], job["back"]["worker"], job["back"]["claims"]) == (1, None, 2)
    assert (job["new"]["cancelling"], job["new"]["labels"], job["new"]["body_bytes"]) == (True, {"tenant": EVIL}, 2)
    assert shown["jobs"][-1]["tokens"] == 0, "the record of an id belongs to its first entry"


async def test_ps_shows_delayed_jobs_and_what_cannot_be_a_job(bench: QueueBench, commands: Commands) -> None:
    worker = await bench.worker("w1", lease=20)
    await bench.submit("later", "low", not_before=await now_ms(bench.redis) + 3_600_000)
    await bench.claimed(worker)
    await bench.submit(f"{EVIL}\n", body=None)
    await bench.redis.xadd(bench.keys.jobs("normal", 0), {b"\xff": b"\x00"})
    shown = commands.json("ps")["jobs"]
    assert [(job["id"], job["state"], job["body_bytes"]) for job in shown] == [
        (f"{EVIL}\n", "waiting", None), ("", "waiting", None), ("later", "delayed", None),
    ]  # fmt: skip
    assert (shown[2]["priority"], 3_590_000 < shown[2]["due_in_ms"] <= 3_600_000) == ("low", True)
    text = commands("ps").stdout
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    assert "delayed 59m" in text


async def test_ps_shows_the_workers(crew: ServiceBench, commands: Commands) -> None:
    await crew.start(engine=FakeEngine(step_seconds=0.02, max_sequences=3))
    await crew.bench.redis.zadd(crew.bench.keys.workers, {f"gone{EVIL}": 5})
    await crew.submit("a", max_tokens=1000)
    await crew.published("a", 1)
    shown = commands.json("ps")
    alive, silent = shown["workers"]
    assert (shown["jobs"][0]["state"], shown["jobs"][0]["worker"]) == ("running", alive["name"])
    assert (alive["state"], alive["jobs"], alive["capacity"], alive["numerics"]) == ("alive", 1, "3", "fake")
    assert (alive["lease_ms"], alive["device"], alive["trial"]) == (600, "cpu", None)
    assert alive["heartbeat_ms"] <= alive["up_ms"] < 60_000
    assert alive["pid"] == str(os.getpid())
    assert (silent["name"], silent["state"], silent["jobs"], silent["host"]) == (f"gone{EVIL}", "silent", 0, None)
    text = commands.text("ps")
    assert re.search(r"^a  running  normal  T  \d+  0  ", text, re.MULTILINE), text
    assert re.search(r"^\S+  alive  1/3  T  T  cpu  -  fake  0\.", text, re.MULTILINE), text
    assert [line for line in text.splitlines() if not line.isprintable()] == []


async def test_ps_shows_who_holds_jobs_without_any_heartbeat(bench: QueueBench, commands: Commands) -> None:
    worker = await bench.worker("w1", lease=20)
    await bench.one(worker)
    await bench.redis.delete(bench.keys.workers, bench.keys.worker("w1"))
    shown = commands.json("ps")
    assert [(row["name"], row["state"], row["jobs"]) for row in shown["workers"]] == [("w1", "gone", 1)]
    assert await states(commands) == {"a": "orphaned"}


# --- bounds ---


def served(server: redis_sync.Redis) -> int:
    """Commands that the server has run, those inside of scripts included."""
    return server.info("stats")["total_commands_processed"]  # type: ignore[index, return-value]


def test_commands_are_gentle_with_a_long_queue(redis_url: str, keys: Keys, commands: Commands) -> None:
    with connect_sync(redis_url) as server:
        for _ in range(20):
            pipeline = server.pipeline(transaction=False)
            for number in range(1000):
                pipeline.xadd(keys.jobs("normal", 0), {"id": f"job{number}", "body": "{}"})
            pipeline.execute()
        for arguments, bound in ((("queue",), 40), (("ps",), 250), (("ps", "--limit", "5"), 60), (("show", "x"), 1100)):
            before, began = served(server), time.monotonic()
            commands(*arguments)
            assert served(server) - before < bound, arguments
            assert time.monotonic() - began < 2, arguments
    assert commands.json("ps")["waiting"] == 20_000
    assert "… and 19,950 more" in commands("ps").stdout


async def test_ps_reads_no_more_than_16_mib_of_bodies(bench: QueueBench, commands: Commands) -> None:
    for number in range(5):
        await bench.submit(f"job{number}", body="x" * (4 << 20))
    shown = commands.json("ps")
    assert len(shown["jobs"]) == 4, "the one that passes the bound is the last"
    assert (shown["jobs"][0]["body_bytes"], shown["waiting"]) == (4 << 20, 5)
    assert "… and 1 more" in commands("ps").stdout


async def test_ps_limit_counts_held_jobs_first(bench: QueueBench, commands: Commands) -> None:
    worker = await bench.worker("w1", lease=20)
    for number in range(5):
        await bench.submit(f"job{number}")
    await bench.claimed(worker, 3)
    assert list(await states(commands)) == [f"job{number}" for number in range(5)]
    shown = commands.json("ps", "--limit", "2")
    assert [job["state"] for job in shown["jobs"]] == ["running", "running"]
    assert "… and 3 more" in commands("ps", "--limit", "2").stdout


# --- queue ---


async def test_queue_shows_depth_lag_and_the_oldest_per_priority(bench: QueueBench, commands: Commands) -> None:
    worker = await bench.worker("w1", lease=20)
    old = await now_ms(bench.redis) - 90_000
    await bench.redis.xadd(bench.keys.jobs("normal", 0), {"id": "held", "body": "{}"}, id=f"{old}-0")
    (held,) = await bench.claimed(worker)
    await bench.redis.xadd(bench.keys.jobs("high", 0), {"id": "old", "body": "{}"}, id=f"{old}-0")
    await bench.submit("new")
    shown = commands.json("queue")
    high, normal, low = shown["priorities"]
    assert (high["waiting"], high["held"], high["lag"]) == (1, 0, 1)
    assert 90_000 <= high["oldest_ms"] < 100_000
    assert (normal["waiting"], normal["held"], normal["lag"], normal["oldest_ms"] < 10_000) == (1, 1, 1, True)
    assert (low["waiting"], low["held"], low["lag"], low["oldest_ms"]) == (0, 0, 0, None)
    assert (shown["workers_alive"], shown["dead"], shown["delayed"], shown["problems"]) == (1, 0, 0, [])
    await worker.release([held])
    normal = commands.json("queue")["priorities"][1]
    assert (normal["waiting"], normal["held"], normal["oldest_ms"] >= 90_000) == (2, 0, True), "a released job waits"


async def test_queue_as_people_see_it(bench: QueueBench, commands: Commands) -> None:
    worker = await bench.worker("w1", lease=20)
    await bench.submit("bad", deadline="soon")
    await bench.submit("later", not_before=await now_ms(bench.redis) + 90_500)
    await bench.claimed(worker)
    await bench.submit("a")
    assert commands.text("queue") == (
        "PRIORITY  WAITING  RUNNING  LAG  OLDEST\n"
        "high  0  0  0  -\n"
        "normal  1  0  1  T\n"
        "low  0  0  0  -\n"
        "\n"
        "delayed  1, the next in T\n"
        "dead  1: gllm dead ls\n"
        "workers  1 alive\n"
    )


async def test_queue_says_when_the_server_has_lost_count(bench: QueueBench, commands: Commands) -> None:
    await bench.worker("w1", lease=20)
    for job_id in "abc":
        await bench.submit(job_id)
    _, (second, _) = await bench.redis.xrange(bench.keys.jobs("normal", 0), count=2)
    await bench.redis.xdel(bench.keys.jobs("normal", 0), second)
    shown = commands.json("queue")["priorities"][1]
    assert (shown["waiting"], shown["lag"]) == (2, None)
    assert "normal  2  0  -  T" in commands.text("queue")


async def test_queue_without_group_or_with_a_foreign_key_says_so(bench: QueueBench, commands: Commands) -> None:
    await bench.submit("a")
    await bench.redis.rpush(bench.keys.jobs("low", 0), "x")
    await bench.redis.set(bench.keys.dead, "x")
    shown = commands.json("queue")
    assert [row["waiting"] for row in shown["priorities"]] == [0, 1, 0]
    assert [row["lag"] for row in shown["priorities"]] == [None, None, None]
    new, wrong = shown["problems"]
    assert new == "no worker has joined this queue yet"
    assert wrong.startswith("jobs:low:0: WRONGTYPE")
    await bench.redis.hset(bench.keys.meta, "version", 1)
    absent, groupless, wrong = commands.json("queue")["problems"]
    assert absent == "jobs:high:0: there is no such stream"
    assert groupless == "jobs:normal:0: it has no group workers"
    assert wrong.startswith("jobs:low:0: WRONGTYPE")
    assert "problem  jobs:low:0: WRONGTYPE" in commands.text("queue")
    assert await states(commands) == {"a": "waiting"}


async def test_queue_adds_up_the_shards_and_does_not_believe_nonsense(bench: QueueBench, commands: Commands) -> None:
    await bench.redis.hset(bench.keys.meta, "shards", 2)
    await bench.worker("w1", lease=20)
    await bench.submit("a")
    await bench.redis.xadd(bench.keys.jobs("normal", 1), {"id": "b", "body": "{}"})
    row = commands.json("queue")["priorities"][1]
    assert (row["waiting"], row["lag"]) == (2, 2)
    assert await states(commands) == {"a": "waiting", "b": "waiting"}
    await bench.redis.hset(bench.keys.meta, "shards", 10**12)
    assert commands.json("queue")["priorities"][1]["waiting"] == 2
    await bench.redis.hset(bench.keys.meta, "shards", "many")
    assert commands.json("queue")["priorities"][1]["waiting"] == 1
    await bench.redis.hset(bench.keys.meta, "shards", 2)


async def test_look_needs_no_right_to_write(own_server: Server, queue_name: str) -> None:
    """A replica answers, too: nothing is written."""
    with connect_sync(own_server.url) as server:
        server.xadd(Keys(queue_name).jobs("high", 0), {"id": "a", "body": "{}"})
        server.execute_command("REPLICAOF", "127.0.0.1", "1")
        commands = Commands(own_server.url, Keys(queue_name))
        assert commands.json("queue")["priorities"][0]["waiting"] == 1
        assert await states(commands) == {"a": "waiting"}
        assert commands.json("show", "a")["state"] == "waiting"


async def test_finished_jobs_leave_ps(bench: QueueBench, commands: Commands) -> None:
    worker = await bench.worker("w1", lease=20)
    await finish(worker, await bench.one(worker), 0)
    assert commands.json("ps")["jobs"] == []
