"""Asks all questions, one after the other."""

from msgspec import Struct
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from worker.doctor import permissions, queue, server
from worker.doctor.facts import Answer, Facts, Status, Unseen, gather, warn
from worker.inspection.inspector import Inspector

CHECKS = {**server.CHECKS, **permissions.CHECKS, **queue.CHECKS}
ASK = "ask somebody who may look"


class Finding(Struct, frozen=True):
    """A check and its answer, as `gllm doctor --json` writes it."""

    check: str
    status: Status
    found: str
    advice: str


def examine(inspector: Inspector) -> list[Finding]:
    """All findings. Raises redis-py's errors when the server cannot be reached."""
    facts = gather(inspector)
    answers = {name: _asked(check, facts) for name, check in CHECKS.items()}
    return [
        Finding(name, answer.status, answer.found, answer.advice)
        for name, answer in answers.items()
        if answer is not None
    ]


def _asked(check: server.Check, facts: Facts) -> Answer | None:
    """What a user may not see, as managed servers forbid CONFIG and ACL, is a warning: nobody knows how it is."""
    try:
        return check(facts)
    except (RedisConnectionError, RedisTimeoutError):
        raise
    except Unseen as unseen:
        return warn(str(unseen), ASK)
    except RedisError as error:
        return warn(f"cannot see it: {error}", ASK)
