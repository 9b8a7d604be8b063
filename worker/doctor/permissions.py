"""Whether this user may do what workers and producers do: each command, on a key of the queue, without running it."""

from typing import Any, cast

from redis.exceptions import NoPermissionError, ResponseError

from worker.doctor.facts import Answer, Facts, Unseen, fail, ok, warn
from worker.doctor.server import Check

# @ stands for the queue's prefix. What the worker's scripts and its own commands send (a test compares).
WORKER = """
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
HMGET @job:x f
HSET @job:x f v
HSETNX @meta f v
PEXPIRE @job:x 1
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
XREAD STREAMS @bell 0
XREADGROUP GROUP workers c STREAMS @jobs:normal:0 >
XREVRANGE @out:x + -
ZADD @delayed 1 x
ZRANGE @delayed 0 1
ZREM @delayed x
ZREMRANGEBYSCORE @workers 0 1
ZREVRANGE @workers 0 0
ZSCORE @workers x
"""
# What a client sends (a test compares).
PRODUCER = """
TIME
WAIT 1 1
CLIENT SETNAME x
DEL @cancel:x
HGET @job:x f
PEXPIREAT @cancel:x 1
SET @cancel:x 1 EX 1
XADD @jobs:normal:0 * f v
XLEN @jobs:normal:0
XRANGE @out:x - +
XREAD STREAMS @out:x 0
ZCARD @delayed
ZSCORE @delayed x
"""
ADVICE = "ACL SETUSER: docs/operations.md has users for workers and for people, docs/protocol.md one for producers"


def permissions(facts: Facts) -> Answer:
    """ACL DRYRUN for each command, in one pipeline."""
    try:
        user = cast(str, facts.redis.acl_whoami())
        worker, producer = _refused(facts, user, WORKER), _refused(facts, user, PRODUCER)
    except ResponseError as error:
        raise Unseen(f"cannot see it: {error}") from None
    if not worker:
        return ok(f"user {user} may do what a worker does" + ("" if producer else ", and what a producer does"))
    if not producer:
        return ok(f"user {user} may do what a producer does, and not what a worker does")
    return fail(f"user {user} may not run {', '.join(worker)}", ADVICE)


def scripts(facts: Facts) -> Answer:
    """A harmless EVAL."""
    try:
        facts.redis.eval("return redis.call('EXISTS', KEYS[1])", 1, facts.keys.meta)
    except NoPermissionError:
        return warn("this user may not run EVAL", "workers and the commands of people need it, producers do not")
    except ResponseError as error:
        return fail(f"EVAL is refused: {error}", "let the server run Lua scripts")
    return ok("Lua scripts run")


def _refused(facts: Facts, user: str, needed: str) -> list[str]:
    commands = [line.replace("@", facts.keys.base).split() for line in needed.strip().splitlines()]
    pipeline = facts.redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command("ACL DRYRUN", user, *command)
    answers: list[Any] = pipeline.execute()
    pairs = zip(commands, answers, strict=True)
    return [" ".join(command[: _words(command)]) for command, answer in pairs if answer not in (b"OK", "OK", True)]


def _words(command: list[str]) -> int:
    return 2 if command[0] in ("XGROUP", "XINFO", "CLIENT") else 1


CHECKS: dict[str, Check] = {"scripts": scripts, "permissions": permissions}
