"""Questions about the server: what it is, what it forgets, what it refuses."""

from collections.abc import Callable

from worker.doctor.facts import Answer, Facts, fail, ok, warn
from worker.humane import duration, size

OLDEST = {"redis": (7, 0), "valkey": (8, 0)}
SLOW_PING_MS = 10.0  # a worker writes tokens every 20 to 40 ms, and each write waits for the answer
FULL, NEARLY_FULL = 0.95, 0.8
IDLE_SECONDS = 30  # `timeout` spares blocked readers; a worker's other connections are idle for a third of a lease
CLAIM_BYTES = 32 * 1024 * 1024  # a claim's answer is at most 16 MiB; twice that for what is on the way
CLOCK_MS = 1000.0

Check = Callable[[Facts], Answer | None]


def reachable(facts: Facts) -> Answer:
    found = f"ping {facts.ping_ms:.2f} ms"
    if facts.ping_ms > SLOW_PING_MS:
        return warn(found, "bring workers and Redis closer: each flush of tokens waits that long")
    return ok(found)


def version(facts: Facts) -> Answer:
    kind = str((facts.info or {}).get("server_name", "redis"))
    text = str(facts.told("valkey_version" if kind == "valkey" else "redis_version"))
    found = f"{kind} {text}"
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
    if kind not in OLDEST or any("dragonfly" in name for name in facts.info or {}):
        return warn(found, "gllm is tested with Redis 7.0 and newer and Valkey 8 and newer only")
    if numbers < OLDEST[kind]:
        return fail(found, "Redis 7.0 or newer, or Valkey 8 or newer, is needed")
    return ok(found)


def role(facts: Facts) -> Answer:
    found = str(facts.told("role"))
    if found != "master":
        return fail(f"{found}: it refuses writes (READONLY)", "name the primary in --redis")
    return ok("primary")


def cluster(facts: Facts) -> Answer | None:
    if not facts.told("cluster_enabled"):
        return None
    found = facts.redis.execute_command("CLUSTER INFO")
    state = str(found.get("cluster_state", "?") if isinstance(found, dict) else found)
    if state != "ok":
        return fail(f"cluster_state {state}", "see redis-cli --cluster check")
    return ok(f"cluster_state ok; {facts.keys.base}* lies in one slot")


def eviction(facts: Facts) -> Answer:
    policy, limit = str(facts.told("maxmemory_policy")), int(facts.told("maxmemory"))
    found = f"maxmemory-policy {policy}"
    if policy == "noeviction":
        return ok(found)
    advice = (
        "CONFIG SET maxmemory-policy noeviction, and in the server's configuration: eviction deletes jobs and replies"
    )
    return Answer("fail" if limit else "warn", found, advice)


def memory(facts: Facts) -> Answer:
    used, limit = int(facts.told("used_memory")), int(facts.told("maxmemory"))
    if not limit:
        advice = (
            "set maxmemory below the machine's memory: a full Redis that refuses writes heals, a killed one does not"
        )
        return warn(f"{size(used)} used, no maxmemory", advice)
    found = f"{size(used)} of {size(limit)} used ({used / limit:.0%})"
    if used > NEARLY_FULL * limit:
        advice = "raise maxmemory or take less in: a full server refuses writes, workers and producers wait"
        return Answer("fail" if used > FULL * limit else "warn", found, advice)
    return ok(found)


def persistence(facts: Facts) -> Answer:
    advice = "CONFIG SET appendonly yes, and in the server's configuration"
    if facts.told("aof_enabled"):
        return ok("appendonly yes")
    saves = facts.setting("save")
    if saves:
        found = f"appendonly no, save {saves}: a restart loses what came after the last snapshot"
        return warn(found, advice)
    return warn("appendonly no, no snapshots: a restart of the server loses every job", advice)


def fsync(facts: Facts) -> Answer | None:
    if not facts.told("aof_enabled"):
        return None
    policy = facts.setting("appendfsync")
    if policy == "no":
        found = "appendfsync no: a crash of the machine loses what its kernel had not written, often 30 seconds"
        return warn(found, "CONFIG SET appendfsync everysec")
    loses = {"everysec": "a crash of the machine loses up to a second", "always": "loses nothing, and is slower"}
    return ok(f"appendfsync {policy}: {loses.get(policy, '?')}")


def saving(facts: Facts) -> Answer:
    if facts.told("aof_last_write_status") != "ok":
        found = "the last write to the append-only file failed: writes are refused (MISCONF)"
        return fail(found, "make room on its disk")
    if facts.told("rdb_last_bgsave_status") != "ok":
        refused = (facts.config or {}).get("stop-writes-on-bgsave-error", "yes") == "yes"
        found = "the last snapshot failed" + (": writes are refused (MISCONF)" if refused else "")
        return Answer("fail" if refused else "warn", found, "see the server's log: disk full, or no memory to fork")
    if facts.told("aof_last_bgrewrite_status") != "ok":
        return warn("the last rewrite of the append-only file failed", "see the server's log")
    return ok("the last writes to disk went well")


def replicas(facts: Facts) -> Answer | None:
    if facts.told("role") != "master":
        return None
    count, least = int(facts.told("connected_slaves")), int(facts.setting("min-replicas-to-write"))
    found = f"{count} connected, min-replicas-to-write {least}"
    if count < least:
        return fail(f"{found}: writes are refused (NOREPLICAS)", "start replicas, or ask for fewer")
    if count and not least:
        advice = "set min-replicas-to-write 1: else a failover can lose jobs that were accepted"
        return warn(found, advice)
    return ok(found if count else "none: the server's disk is all there is")


def idle_connections(facts: Facts) -> Answer:
    seconds = int(facts.setting("timeout"))
    found = f"timeout {seconds}"
    if 0 < seconds < IDLE_SECONDS:
        advice = f"CONFIG SET timeout 0, or {IDLE_SECONDS} at least: what is cut has to be connected again and again"
        return warn(found, advice)
    return ok(found)


def buffers(facts: Facts) -> Answer:
    words = facts.setting("client-output-buffer-limit").split()
    limits = {words[at]: words[at + 1 : at + 3] for at in range(0, len(words) - 3, 4)}
    hard, soft = (int(limit) for limit in limits.get("normal", ("0", "0")))
    found = f"client-output-buffer-limit normal {size(hard) if hard else 'none'}"
    if 0 < hard < CLAIM_BYTES or 0 < soft < CLAIM_BYTES:
        advice = f"raise both limits to {size(CLAIM_BYTES)} or 0: the answer to a claim may be 16 MiB, and is cut off"
        return warn(found, advice)
    return ok(found)


def connections(facts: Facts) -> Answer:
    count, limit = int(facts.told("connected_clients")), int(facts.told("maxclients"))
    found = f"{count:,} of {limit:,}"
    if count > NEARLY_FULL * limit:
        return warn(found, "raise maxclients: each reader of a reply holds a connection")
    return ok(found)


def clock(facts: Facts) -> Answer | None:
    if facts.clock_ms is None:
        return None
    ahead = facts.clock_ms
    found = f"the server's is {duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this host's"
    if abs(ahead) > CLOCK_MS:
        advice = "set the clocks (NTP): deadline and not_before mean the server's clock, whoever computes them"
        return warn(found, advice)
    return ok(found)


CHECKS: dict[str, Check] = {
    "reachable": reachable, "version": version, "role": role, "cluster": cluster, "eviction": eviction,
    "memory": memory, "persistence": persistence, "fsync": fsync, "saving": saving, "replicas": replicas,
    "idle connections": idle_connections, "buffers": buffers, "connections": connections, "clock": clock,
}  # fmt: skip
