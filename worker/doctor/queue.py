"""Questions about the queue: whether it is whole, whether somebody works, what is stuck."""

from typing import Any

from gllm.keys import GROUP
from gllm.protocol import VERSION
from worker.doctor.facts import Answer, Facts, fail, ok, warn
from worker.doctor.server import Check
from worker.humane import counted, duration
from worker.inspection.scripts import text
from worker.queue import MAX_SHARDS

LONG_WAIT_MS = 60_000
OVERDUE_MS = 5_000  # a claim promotes what is due, and idle workers claim each second
SCANNED_KEYS = 10_000
PERMANENT = ("jobs:", "dead", "bell", "workers", "meta", "delayed")
TYPES = {"meta": "hash", "workers": "zset", "delayed": "zset", "dead": "stream", "bell": "stream"}


def meta(facts: Facts) -> Answer:
    seen = facts.seen()
    if not seen.version:
        return warn("no worker has joined it yet", f"gllm worker --queue {facts.keys.queue}")
    found = f"protocol {seen.version}, shards {seen.shards or '?'}, model {seen.model[:12] or '?'}"
    if seen.version != str(VERSION):
        return fail(found, f"this gllm speaks protocol {VERSION}: upgrade, or use another queue")
    if not (seen.shards.isdecimal() and 1 <= int(seen.shards) <= MAX_SHARDS):
        return fail(found, f"set the field shards of {facts.keys.meta} to what it was, 1 by default")
    return ok(found)


def types(facts: Facts) -> Answer:
    wanted = {facts.keys.base + name: kind for name, kind in TYPES.items()}
    wanted |= {facts.keys.base + stream.name: "stream" for stream in facts.seen().streams}
    pipeline = facts.redis.pipeline(transaction=False)
    for key in wanted:
        pipeline.type(key)
    got = {key: text(kind) for key, kind in zip(wanted, pipeline.execute(), strict=True)}
    wrong = [
        f"{key} is a {kind}, not a {wanted[key]}" for key, kind in got.items() if kind not in ("none", wanted[key])
    ]
    if wrong:
        return fail("; ".join(wrong), "rename or delete them: the prefix is gllm's alone")
    return ok("each of its type")


def groups(facts: Facts) -> Answer | None:
    seen = facts.seen()
    if not seen.version:
        return None
    broken = [f"{stream.name}: {stream.problem}" for stream in seen.streams if stream.problem]
    if broken:
        return warn("; ".join(broken), "a worker makes them again when it claims next")
    if others := _other_groups(facts):
        advice = "let nothing but gllm read job streams: entries are deleted as soon as a job has ended"
        return warn(f"other groups: {', '.join(others)}", advice)
    return ok(f"{GROUP} on {counted(len(seen.streams), 'stream')}")


def _other_groups(facts: Facts) -> list[str]:
    pipeline = facts.redis.pipeline(transaction=False)
    for stream in facts.seen().streams:
        pipeline.xinfo_groups(facts.keys.base + stream.name)
    answers: list[Any] = pipeline.execute()
    return sorted({text(group["name"]) for answer in answers for group in answer} - {GROUP})


def strays(facts: Facts) -> Answer:
    """A bounded look for job streams that no worker looks at."""
    base, served = facts.keys.base, {stream.name for stream in facts.seen().streams}
    names = {text(name).removeprefix(base) for page in _cursors(facts, "jobs:*") for name in page}
    if lost := sorted(names - served):
        found = f"no worker looks at {', '.join(lost[:3])}" + (f" and {len(lost) - 3:,} more" if lost[3:] else "")
        return fail(found, "a producer took another priority or shard: submit these jobs again where there is one")
    return ok("every job stream is looked at")


def workers(facts: Facts) -> Answer:
    alive, silent = len(facts.alive), [worker for worker in facts.workers if worker.state == "silent"]
    waiting = sum(stream.waiting for stream in facts.seen().streams)
    if not alive:
        found = f"none is alive, {counted(waiting, 'job')} waiting"
        return Answer("fail" if waiting else "warn", found, f"gllm worker --queue {facts.keys.queue}")
    capacities = [worker.capacity or "" for worker in facts.alive]
    room = sum(int(capacity) for capacity in capacities if capacity.isdecimal())
    found = f"{alive} alive, room for {counted(room, 'job')}"
    if silent:
        oldest = duration(max(worker.heartbeat_ms or 0 for worker in silent))
        advice = (
            "killed, frozen, or cut off from Redis: look at their logs, or wait until they are forgotten (10 leases)"
        )
        return warn(f"{found}; {len(silent)} silent, the longest for {oldest}", advice)
    return ok(found)


def agreement(facts: Facts) -> Answer | None:
    if len(facts.alive) < 2:
        return None
    numerics = {worker.numerics for worker in facts.alive}
    versions = sorted({worker.version or "?" for worker in facts.alive})
    if len(numerics) > 1:
        advice = "use equal devices, dtypes and versions where a job that is taken over must go on with the same text"
        return warn(f"workers compute in {len(numerics)} different ways (numerics)", advice)
    if len(versions) > 1:
        return warn(f"workers of versions {', '.join(versions)}", "finish the upgrade")
    return ok("all workers compute alike")


def holders(facts: Facts) -> Answer:
    lost = [worker for worker in facts.workers if worker.state != "alive" and worker.jobs]
    count = sum(worker.jobs for worker in lost)
    if not count:
        return ok("every job that runs has a worker that is alive")
    advice = "others take them over within a lease" if facts.alive else f"gllm worker --queue {facts.keys.queue}"
    found = f"{counted(count, 'job')} in the name of {counted(len(lost), 'worker')} without a fresh heartbeat"
    return warn(found, advice)


def backlog(facts: Facts) -> Answer:
    seen = facts.seen()
    waiting = sum(stream.waiting for stream in seen.streams)
    ages = [seen.now_ms - stream.oldest_ms for stream in seen.streams if stream.oldest_ms is not None]
    found = f"{counted(waiting, 'job')} waiting" + (f", the oldest for {duration(max(ages))}" if ages else "")
    if ages and max(ages) > LONG_WAIT_MS:
        advice = "more workers, or larger ones: these are full" if facts.alive else "somebody has to work"
        return warn(found, advice)
    if any(stream.lag is None and not stream.problem for stream in seen.streams):
        advice = "scale by the number that waits: lag stays unknown until the group has read on"
        return warn(f"{found}; lag unknown, because a waiting entry was deleted", advice)
    return ok(found)


def delayed(facts: Facts) -> Answer:
    seen = facts.seen()
    late = None if seen.due_ms is None else seen.now_ms - seen.due_ms
    if late is None:
        return ok("none")
    if late > OVERDUE_MS:
        advice = "a claim promotes them: is there a worker with room?"
        return warn(f"{counted(seen.delayed, 'job')}, one overdue for {duration(late)}", advice)
    return ok(f"{counted(seen.delayed, 'job')}, the next in {duration(max(0, -late))}")


def dead(facts: Facts) -> Answer:
    count = facts.seen().dead
    if count:
        return warn(f"{count:,}", "gllm dead ls; then gllm dead retry, or gllm dead purge")
    return ok("none")


def lives(facts: Facts) -> Answer:
    """A bounded look at keys: each must expire or be one of the permanent ones."""
    base, looked, immortal = facts.keys.base, 0, list[str]()
    for cursor in _cursors(facts):
        names = [text(name) for name in cursor]
        looked += len(names)
        pipeline = facts.redis.pipeline(transaction=False)
        temporary = [name for name in names if not name.removeprefix(base).startswith(PERMANENT)]
        for name in temporary:
            pipeline.ttl(name)
        immortal += [name for name, ttl in zip(temporary, pipeline.execute(), strict=True) if ttl == -1]
    if immortal:
        found = (
            f"1 key never expires: {immortal[0]}"
            if len(immortal) == 1
            else (f"{len(immortal):,} keys never expire, like {immortal[0]}")
        )
        return warn(found, "nobody will delete them: DEL, if they are nobody's")
    return ok(f"each of the {counted(looked, 'key')} looked at expires or is to stay")


def _cursors(facts: Facts, pattern: str = "*") -> Any:
    """Pages of the queue's keys out of the first SCANNED_KEYS of the database."""
    cursor, left = 0, SCANNED_KEYS
    while left > 0:
        cursor, names = facts.redis.scan(cursor, match=f"{facts.keys.base}{pattern}", count=1000)  # type: ignore[misc]
        yield names
        left -= 1000
        if cursor == 0:
            return


CHECKS: dict[str, Check] = {
    "queue": meta, "keys": types, "groups": groups, "streams": strays, "workers": workers, "agreement": agreement,
    "holders": holders, "backlog": backlog, "delayed": delayed, "dead letters": dead, "lives of keys": lives,
}  # fmt: skip
