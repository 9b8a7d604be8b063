"""Each question of `gllm doctor`, with answers made up."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from redis import Redis

from gllm.keys import Keys
from worker.doctor import permissions, queue, server
from worker.doctor.facts import Facts, Unseen
from worker.inspection.records import StreamView, Survey, WorkerRow
from worker.scripts import FOLDER

ROOT = Path(__file__).resolve().parent.parent.parent
HEALTHY = {
    "redis_version": "7.0.15", "role": "master", "cluster_enabled": 0, "maxmemory_policy": "noeviction",
    "maxmemory": 1 << 30, "used_memory": 1 << 20, "aof_enabled": 1, "aof_last_write_status": "ok",
    "rdb_last_bgsave_status": "ok", "aof_last_bgrewrite_status": "ok", "connected_slaves": 0, "connected_clients": 3,
    "maxclients": 10_000,
}  # fmt: skip
SETTINGS = {
    "appendfsync": "everysec", "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 1 1 1",
    "min-replicas-to-write": "0", "save": "", "stop-writes-on-bgsave-error": "yes", "timeout": "0",
}  # fmt: skip
STREAM = StreamView(
    name="jobs:normal:0", entries=0, waiting=0, lag=0, last_id="0-0", oldest_ms=None, problem=None, held={}
)


def facts(
    *,
    info: dict[str, Any] | None = None,
    config: dict[str, str] | None = None,
    seen: dict[str, Any] | None = None,
    stream: dict[str, Any] | None = None,
    workers: tuple[dict[str, Any], ...] = ({"name": "w1"},),
    **changes: Any,
) -> Facts:
    """A healthy server and queue, but for what is given."""
    survey = Survey(
        now_ms=1_000_000, version="1", shards="1", model="digest", quiet_until_ms=0, delayed=0, due_ms=None, dead=0,
        workers=1, streams=[msgspec.structs.replace(STREAM, **(stream or {}))],
    )  # fmt: skip
    worker = {"state": "alive", "jobs": 0, "heartbeat_ms": 10, "capacity": "64", "numerics": "n", "version": "0.1.0"}
    values: dict[str, Any] = {
        "redis": cast(Redis, None), "keys": Keys("q"), "ping_ms": 0.2, "clock_ms": 1.0, "unseen": {},
        "info": {**HEALTHY, **(info or {})}, "config": {**SETTINGS, **(config or {})},
        "survey": msgspec.structs.replace(survey, **(seen or {})),
        "workers": [WorkerRow(**{**worker, **row}) for row in workers],
    }  # fmt: skip
    return Facts(**{**values, **changes})


PURE = [check for check in server.CHECKS.values() if check is not server.cluster]
OF_QUEUE = (queue.meta, queue.workers, queue.agreement, queue.holders, queue.backlog, queue.delayed, queue.dead)


@pytest.mark.parametrize("check", [*PURE, *OF_QUEUE], ids=lambda check: check.__name__)
def test_doctor_finds_nothing_wrong_with_a_healthy_server(check: server.Check) -> None:
    finding = check(facts())
    assert finding is None or (finding.status, finding.advice) == ("ok", "")


JUDGED: list[tuple[server.Check, dict[str, Any], str, str]] = [
    (server.reachable, {"ping_ms": 40.0}, "warn", "ping 40.00 ms"),
    (server.version, {"info": {"redis_version": "6.2.14"}}, "fail", "redis 6.2.14"),
    (server.version, {"info": {"redis_version": "8.2.3"}}, "ok", "redis 8.2.3"),
    (server.version, {"info": {"server_name": "valkey", "valkey_version": "7.2.4"}}, "fail", "valkey 7.2.4"),
    (server.version, {"info": {"server_name": "valkey", "valkey_version": "9.1.2"}}, "ok", "valkey 9.1.2"),
    (server.version, {"info": {"dragonfly_version": "df-1.2"}}, "warn", "redis 7.0.15"),
    (server.role, {"info": {"role": "slave"}}, "fail", "READONLY"),
    (server.eviction, {"info": {"maxmemory_policy": "allkeys-lru"}}, "fail", "allkeys-lru"),
    (server.eviction, {"info": {"maxmemory_policy": "volatile-ttl"}}, "fail", "volatile-ttl"),
    (server.eviction, {"info": {"maxmemory_policy": "allkeys-lru", "maxmemory": 0}}, "warn", "allkeys-lru"),
    (server.memory, {"info": {"maxmemory": 0}}, "warn", "1.0 MiB used, no maxmemory"),
    (server.memory, {"info": {"used_memory": 900 << 20}}, "warn", "900.0 MiB of 1.0 GiB used (88%)"),
    (server.memory, {"info": {"used_memory": 1 << 30}}, "fail", "(100%)"),
    (server.persistence, {"info": {"aof_enabled": 0}}, "warn", "loses every job"),
    (server.persistence, {"info": {"aof_enabled": 0}, "config": {"save": "3600 1"}}, "warn", "save 3600 1"),
    (server.fsync, {"config": {"appendfsync": "no"}}, "warn", "appendfsync no"),
    (server.fsync, {"config": {"appendfsync": "always"}}, "ok", "loses nothing"),
    (server.saving, {"info": {"aof_last_write_status": "err"}}, "fail", "MISCONF"),
    (server.saving, {"info": {"rdb_last_bgsave_status": "err"}}, "fail", "MISCONF"),
    (
        server.saving,
        {"info": {"rdb_last_bgsave_status": "err"}, "config": {"stop-writes-on-bgsave-error": "no"}},
        "warn",
        "the last snapshot failed",
    ),
    (server.saving, {"info": {"aof_last_bgrewrite_status": "err"}}, "warn", "rewrite"),
    (server.replicas, {"info": {"connected_slaves": 2}}, "warn", "2 connected, min-replicas-to-write 0"),
    (
        server.replicas,
        {"info": {"connected_slaves": 1}, "config": {"min-replicas-to-write": "1"}},
        "ok",
        "1 connected, min-replicas-to-write 1",
    ),
    (server.replicas, {"config": {"min-replicas-to-write": "1"}}, "fail", "NOREPLICAS"),
    (server.idle_connections, {"config": {"timeout": "5"}}, "warn", "timeout 5"),
    (server.idle_connections, {"config": {"timeout": "300"}}, "ok", "timeout 300"),
    (server.buffers, {"config": {"client-output-buffer-limit": "normal 1048576 0 0"}}, "warn", "1.0 MiB"),
    (server.buffers, {"config": {"client-output-buffer-limit": "normal 0 1024 60 slave 0 0 0"}}, "warn", "none"),
    (server.connections, {"info": {"connected_clients": 9000}}, "warn", "9,000 of 10,000"),
    (server.clock, {"clock_ms": 90_000.0}, "warn", "1m30s ahead"),
    (server.clock, {"clock_ms": -1500.0}, "warn", "1.5s behind"),
    (queue.meta, {"seen": {"version": ""}}, "warn", "no worker has joined"),
    (queue.meta, {"seen": {"version": "2"}}, "fail", "protocol 2"),
    (queue.meta, {"seen": {"shards": "many"}}, "fail", "shards many"),
    (queue.meta, {"seen": {"shards": "0"}}, "fail", "shards 0"),
    (queue.workers, {"workers": ()}, "warn", "none is alive, 0 jobs waiting"),
    (queue.workers, {"workers": (), "stream": {"waiting": 3}}, "fail", "none is alive, 3 jobs waiting"),
    (
        queue.workers,
        {"workers": ({"name": "a"}, {"name": "b", "state": "silent", "heartbeat_ms": 65_000})},
        "warn",
        "1 alive, room for 64 jobs; 1 silent, the longest for 1m5s",
    ),
    (queue.agreement, {"workers": ({"name": "a"}, {"name": "b", "numerics": "m"})}, "warn", "2 different ways"),
    (queue.agreement, {"workers": ({"name": "a"}, {"name": "b", "version": "0.2"})}, "warn", "0.1.0, 0.2"),
    (queue.agreement, {"workers": ({"name": "a"}, {"name": "b"})}, "ok", "alike"),
    (queue.holders, {"workers": ({"name": "a", "state": "gone", "jobs": 3},)}, "warn", "3 jobs in the name of 1"),
    (queue.backlog, {"stream": {"waiting": 2, "oldest_ms": 900_000}}, "warn", "the oldest for 1m40s"),
    (queue.backlog, {"stream": {"waiting": 2, "oldest_ms": 999_000}}, "ok", "2 jobs waiting, the oldest for 1.0s"),
    (queue.backlog, {"stream": {"waiting": 2, "lag": None}}, "warn", "lag unknown"),
    (queue.delayed, {"seen": {"delayed": 2, "due_ms": 990_000}}, "warn", "2 jobs, one overdue for 10s"),
    (queue.delayed, {"seen": {"delayed": 1, "due_ms": 1_030_000}}, "ok", "1 job, the next in 30s"),
    (queue.dead, {"seen": {"dead": 1200}}, "warn", "1,200"),
]


@pytest.mark.parametrize(("check", "given", "status", "found"), JUDGED)
def test_doctor_judges(check: server.Check, given: dict[str, Any], status: str, found: str) -> None:
    finding = check(facts(**given))
    assert finding is not None
    assert finding.status == status
    assert found in finding.found
    assert bool(finding.advice) == (status != "ok")


def test_doctor_says_what_it_cannot_see() -> None:
    blind = Facts(
        redis=cast(Redis, None), keys=Keys("q"), ping_ms=0.2, clock_ms=None, info=None, config=None, survey=None,
        workers=[], unseen={"info": "cannot see it: NOPERM"},
    )  # fmt: skip
    assert server.clock(blind) is None
    for check in (server.version, server.memory, server.idle_connections, queue.backlog):
        with pytest.raises(Unseen):
            check(blind)


def asked(needed: str) -> set[str]:
    return {line.split()[0] for line in needed.strip().splitlines()}


def test_doctor_asks_for_every_command_of_a_worker() -> None:
    """Those of its scripts, and what it sends itself."""
    source = (FOLDER.parent / "scripts.py").read_text()
    names = {"common", *re.findall(r'"(\w+)"', " ".join(re.findall(r"Script\((.*?)\)", source)))} - {"requeue"}
    lua = "\n".join((FOLDER / f"{name}.lua").read_text() for name in names)
    sent = set(re.findall(r"(?:redis\.call|own)\('([A-Z]+)'", lua))
    assert len(sent) > 20
    assert asked(permissions.WORKER) == sent | {"EVAL", "EVALSHA", "XREAD", "XRANGE", "CLIENT"}


def test_doctor_asks_for_every_command_of_a_producer() -> None:
    """Those that the client's text calls, and the name that its connections set."""
    client = (ROOT / "gllm" / "client.py").read_text()
    called = set(re.findall(r"\b(?:pipeline|_redis|_?reader)\.([a-z]+)\(", client))
    sent = called - {"pipeline", "execute", "aclose", "client"}
    assert len(sent) > 10
    assert asked(permissions.PRODUCER) == {"DEL" if name == "delete" else name.upper() for name in sent} | {"CLIENT"}


def test_doctor_of_a_cluster_that_is_up() -> None:
    node = SimpleNamespace(execute_command=lambda command: {"cluster_state": "ok"})
    answer = server.cluster(facts(info={"cluster_enabled": 1}, redis=node))
    assert answer is not None
    assert (answer.status, answer.found) == ("ok", "cluster_state ok; gllm:{q}:* lies in one slot")
