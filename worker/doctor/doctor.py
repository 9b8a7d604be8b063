"""Asks all questions, one after the other."""

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from worker.doctor import permissions, queue, server
from worker.doctor.facts import Facts, Finding, Unseen, gather
from worker.inspection.inspector import Inspector

CHECKS = (*server.CHECKS, permissions.scripts, permissions.permissions, *queue.CHECKS)


def examine(inspector: Inspector) -> list[Finding]:
    """All findings. Raises redis-py's errors when the server cannot be reached."""
    facts = gather(inspector)
    findings = (_asked(check, facts) for check in CHECKS)
    return [finding for finding in findings if finding is not None]


def _asked(check: server.Check, facts: Facts) -> Finding | None:
    """What a user may not see, as managed servers forbid CONFIG and ACL, is a warning: nobody knows how it is."""
    name = check.__name__.replace("_", " ")
    try:
        return check(facts)
    except (RedisConnectionError, RedisTimeoutError):
        raise
    except Unseen as unseen:
        return Finding(name, "warn", str(unseen), "ask somebody who may look")
    except RedisError as error:
        return Finding(name, "warn", f"cannot see it: {error}", "ask somebody who may look")
