"""`gllm doctor` on real servers, well run and not."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.servers import Server, binaries
from tests.worker.command_bench import Commands, stable
from tests.worker.fake_engine import FakeEngine
from tests.worker.service_bench import ServiceBench
from worker.doctor.doctor import Finding
from worker.embedded import free_port


def findings(commands: Commands, status: int) -> dict[str, Finding]:
    return {row["check"]: Finding(**row) for row in commands.json("doctor", status=status)}


def fresh(server: Server, queue_name: str, **settings: Any) -> Commands:
    """Commands for a queue on a server of the test's own, with these settings."""
    with connect_sync(server.url) as client:
        for name, value in settings.items():
            client.config_set(name.replace("_", "-"), value)
    return Commands(server.url, Keys(queue_name))


async def test_doctor_of_a_well_run_queue(own_crew: ServiceBench, own_server: Server, queue_name: str) -> None:
    commands = fresh(own_server, queue_name, appendonly="yes", maxmemory=200 << 20)
    await own_crew.start(engine=FakeEngine(max_sequences=3), lease=20)
    await own_crew.submit("a")
    await own_crew.reply("a")
    found = findings(commands, 0)
    assert [finding for finding in found.values() if finding.status != "ok"] == []
    assert set(found) == {
        "reachable", "version", "role", "eviction", "memory", "persistence", "fsync", "saving", "replicas",
        "idle connections", "buffers", "connections", "clock", "scripts", "permissions", "queue", "keys", "groups",
        "streams", "workers", "holders", "backlog", "delayed", "dead letters", "lives of keys",
    }  # fmt: skip
    assert found["workers"].found == "1 alive, room for 3 jobs"
    text = commands.text("doctor")
    assert any(line.startswith("ok  role  primary") for line in text.splitlines())
    assert text.endswith("\n0 failures, 0 warnings\n")


async def test_doctor_of_a_queue_in_trouble(own_server: Server, queue_name: str) -> None:
    commands, keys = fresh(own_server, queue_name, maxmemory_policy="allkeys-lru", maxmemory=1 << 30), Keys(queue_name)
    with connect_sync(own_server.url) as client:
        client.hset(keys.meta, mapping={"version": 1, "shards": 1, "model": "x" * 40})
        client.xgroup_create(keys.jobs("high", 0), "workers", "0", mkstream=True)
        client.xgroup_create(keys.jobs("high", 0), "spies", "0")
        client.xgroup_create(keys.jobs("normal", 0), "workers", "0", mkstream=True)
        client.xadd(keys.jobs("high", 0), {"id": "a", "body": "{}"}, id="1-1")
        client.xreadgroup("workers", "dead-1-00", {keys.jobs("high", 0): ">"})
        client.xadd(keys.jobs("high", 0), {"id": "b", "body": "{}"})
        client.xadd(keys.dead, {"id": "c"})
        client.zadd(keys.delayed, {"d": 5})
        client.hset(keys.job("e"), "state", "running")
        client.set(keys.bell, "x")
        client.xadd(keys.jobs("normal", 1), {"id": "f", "body": "{}"})
    found = findings(commands, 1)
    broken = {name: finding.status for name, finding in found.items() if finding.status != "ok"}
    assert broken == {
        "eviction": "fail", "persistence": "warn", "keys": "fail", "groups": "warn", "streams": "fail",
        "workers": "fail", "holders": "warn", "delayed": "warn", "dead letters": "warn", "lives of keys": "warn",
    }  # fmt: skip
    assert found["groups"].found == "jobs:low:0: there is no such stream"
    assert found["streams"].found == "no worker looks at jobs:normal:1"
    assert found["keys"].found == f"{keys.bell} is a string, not a stream"
    assert found["lives of keys"].found == f"1 key never expires: {keys.job('e')}"
    assert found["holders"].advice == f"gllm worker --queue {queue_name}"
    with connect_sync(own_server.url) as client:
        client.xgroup_create(keys.jobs("low", 0), "workers", "0", mkstream=True)
    assert findings(commands, 1)["groups"].found == "other groups: spies"
    text = stable(commands("doctor").stdout)
    assert "fail  eviction  maxmemory-policy allkeys-lru\n  → CONFIG SET maxmemory-policy noeviction" in text
    assert text.endswith("\n4 failures, 6 warnings\n")


def test_doctor_of_a_new_queue_only_warns(own_server: Server, queue_name: str) -> None:
    found = findings(fresh(own_server, queue_name), 0)
    assert {name for name, finding in found.items() if finding.status == "warn"} == {
        "memory", "persistence", "queue", "workers",
    }  # fmt: skip


def test_doctor_asks_what_its_user_may_do(own_server: Server, queue_name: str) -> None:
    """Some may not read, some may not look at settings, some may not run scripts: it says so, and goes on."""
    base = Keys(queue_name).base
    users = {
        "reader": ["+@read", "+@connection", "+time", "+info", "+acl|whoami", "+acl|dryrun", "+eval", "+evalsha"],
        "worker": ["+@all", "-@dangerous", "+info", "-acl", "-config"],
        "mute": ["+@all", "-@scripting"],
    }
    with connect_sync(own_server.url) as client:
        for name, rules in users.items():
            client.execute_command("ACL", "SETUSER", name, "on", ">x", f"~{base}*", *rules)
    url = own_server.url.replace("redis://", "redis://{}:x@")
    found = findings(Commands(url.format("reader"), Keys(queue_name)), 1)
    assert re.match(r"user reader may not run DEL, .*XADD.*", found["permissions"].found)
    assert "XRANGE" not in found["permissions"].found
    assert found["idle connections"].status == "warn"
    found = findings(Commands(url.format("worker"), Keys(queue_name)), 0)
    for name in ("permissions", "idle connections", "buffers", "persistence"):
        assert re.search("cannot see it: .*permission", found[name].found), name
    assert found["scripts"].status == "ok"
    found = findings(Commands(url.format("mute"), Keys(queue_name)), 0)
    assert (found["scripts"].status, found["queue"].status) == ("warn", "warn")
    assert found["permissions"].found == "user mute may do what a producer does, and not what a worker does"


@contextmanager
def running(binary: Path, folder: Path, *options: str) -> Iterator[Server]:
    server = Server(binary, folder, "--save", "", *options)
    try:
        server.start()
        yield server
    finally:
        server.stop(kill=True)


def test_doctor_of_a_managed_server(server_kind: str, tmp_path: Path, queue_name: str) -> None:
    """One that knows neither CONFIG nor ACL."""
    hidden = ("--rename-command", "CONFIG", "", "--rename-command", "ACL", "")
    with running(binaries()[server_kind], tmp_path, *hidden) as server:
        found = findings(Commands(server.url, Keys(queue_name)), 0)
    for name in ("permissions", "idle connections", "buffers", "persistence"):
        assert (found[name].status, found[name].advice) == ("warn", "ask somebody who may look")
        assert "unknown command" in found[name].found
    assert (found["role"].status, found["scripts"].status, found["queue"].status) == ("ok", "ok", "warn")


def test_doctor_of_a_cluster_that_is_down(server_kind: str, tmp_path: Path, queue_name: str) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with running(binaries()[server_kind], tmp_path, *options) as server:
        found = findings(Commands(server.url, Keys(queue_name)), 1)
    assert (found["cluster"].status, found["cluster"].found) == ("fail", "cluster_state fail")
    assert "CLUSTERDOWN" in found["queue"].found or "not served" in found["queue"].found


@pytest.mark.parametrize("right", ["xrange", "hmget", "xpending"])
async def test_jobs_that_a_user_may_not_see_are_not_left_out(
    own_server: Server, own_crew: ServiceBench, queue_name: str, right: str
) -> None:
    keys = Keys(queue_name)
    worker = await own_crew.bench.worker("w1", lease=20)
    await own_crew.bench.one(worker)
    with connect_sync(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "blind", "on", ">x", f"~{keys.base}*", "+@all", f"-{right}")
    commands = Commands(own_server.url.replace("://", "://blind:x@"), keys)
    for command in (["ps"], ["show", "a"]):
        result = commands(*command)
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
        assert "ermission" in result.stderr or "can't run this command" in result.stderr


def test_counts_that_a_user_may_not_see_are_no_zeros(own_server: Server, queue_name: str) -> None:
    keys = Keys(queue_name)
    with connect_sync(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "blind", "on", ">x", f"~{keys.base}*", "+@all", "-zcard", "-ping")
        client.zadd(keys.delayed, {"a": 1})
    commands = Commands(own_server.url.replace("://", "://blind:x@"), keys)
    for command in (["queue"], ["ps"], ["show", "a"]):
        result = commands(*command)
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
        assert "ermission" in result.stderr or "can't run this command" in result.stderr
    found = findings(commands, 0)
    assert found["reachable"].status == "ok", "PING may be forbidden"
    assert found["delayed"].found.startswith("cannot see it: ")
    assert commands.json("cancel", "a") == [{"id": "a", "cancelling": True}]
