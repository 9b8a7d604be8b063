"""Whether this user may do what workers and producers do: each command, on a key of the queue, without running it."""

from typing import Any, cast

from redis.exceptions import ResponseError

from worker.doctor.facts import Answer, Facts, Unseen, fail, ok
from worker.doctor.server import Check

# @ stands for the queue's prefix. Every command that the scripts, a worker or a client sends (a test compares).
NEEDED = """
PING
TIME
CLIENT SETNAME x
EVAL x 1 @meta
EVALSHA x 1 @meta
DEL @job:x
EXISTS @cancel:x
HDEL @job:x f
HEXISTS @meta f
HGET @meta f
HGETALL @job:x
HINCRBY @job:x f 1
HLEN @job:x
HMGET @job:x f
HSET @job:x f v
HSETNX @meta f v
PEXPIRE @job:x 1
PEXPIREAT @cancel:x 1
SET @cancel:x 1 EX 1
XACK @jobs:normal:0 workers 1-0
XADD @jobs:normal:0 * f v
XCLAIM @jobs:normal:0 workers c 0 1-0
XDEL @jobs:normal:0 1-0
XGROUP CREATE @jobs:normal:0 workers 0
XGROUP DELCONSUMER @jobs:normal:0 workers c
XINFO CONSUMERS @jobs:normal:0 workers
XINFO GROUPS @jobs:normal:0
XLEN @jobs:normal:0
XPENDING @jobs:normal:0 workers
XRANGE @out:x - +
XREAD STREAMS @out:x 0
XREADGROUP GROUP workers c STREAMS @jobs:normal:0 >
XREVRANGE @out:x + -
ZADD @delayed 1 x
ZCARD @workers
ZRANGE @delayed 0 1
ZREM @delayed x
ZREMRANGEBYSCORE @workers 0 1
ZREVRANGE @workers 0 0
ZSCORE @workers x
"""


def permissions(facts: Facts) -> Answer:
    """ACL DRYRUN for each command, in one pipeline."""
    try:
        user = cast(bytes | str, facts.redis.execute_command("ACL WHOAMI"))
        refused = _refused(facts, user)
    except ResponseError as error:
        raise Unseen(f"cannot see it: {error}") from None
    name = user.decode(errors="backslashreplace") if isinstance(user, bytes) else user
    if refused:
        found = f"user {name} may not run {', '.join(refused)}"
        return fail(found, "ACL SETUSER: see docs/operations.md for what a worker needs")
    return ok(f"user {name} may do what a worker does")


def scripts(facts: Facts) -> Answer:
    """A harmless EVAL."""
    try:
        facts.redis.eval("return redis.call('EXISTS', KEYS[1])", 1, facts.keys.meta)
    except ResponseError as error:
        return fail(f"EVAL is refused: {error}", "let this user run EVAL and EVALSHA")
    return ok("Lua scripts run")


def _refused(facts: Facts, user: bytes | str) -> list[str]:
    commands = [line.replace("@", facts.keys.base).split() for line in NEEDED.strip().splitlines()]
    pipeline = facts.redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command("ACL DRYRUN", user, *command)
    answers: list[Any] = pipeline.execute()
    pairs = zip(commands, answers, strict=True)
    return [" ".join(command[: _words(command)]) for command, answer in pairs if answer not in (b"OK", "OK", True)]


def _words(command: list[str]) -> int:
    return 2 if command[0] in ("XGROUP", "XINFO", "CLIENT") else 1


CHECKS: dict[str, Check] = {"scripts": scripts, "permissions": permissions}
