"""What the doctor looks at, read once. What this user may not see is absent, and each check says so for itself."""

import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from msgspec import Struct
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gllm.keys import Keys
from worker.inspection.inspector import Inspector
from worker.inspection.records import Survey, WorkerRow

PINGS = 5
SETTINGS = (
    "appendfsync", "client-output-buffer-limit", "min-replicas-to-write", "save", "stop-writes-on-bgsave-error",
    "timeout",
)  # fmt: skip

Status = Literal["ok", "warn", "fail"]
T = TypeVar("T")


class Answer(Struct, frozen=True):
    """What one check says. `advice`: what to do, empty for `ok`."""

    status: Status
    found: str
    advice: str = ""


def ok(found: str) -> Answer:
    return Answer("ok", found)


def warn(found: str, advice: str) -> Answer:
    return Answer("warn", found, advice)


def fail(found: str, advice: str) -> Answer:
    return Answer("fail", found, advice)


class Unseen(Exception):
    """Something that this user may not look at."""


class Facts(Struct, frozen=True, kw_only=True):
    """`clock_ms`: by how much the server's clock is ahead of this host's. `unseen`: why something is None."""

    redis: Redis
    keys: Keys
    ping_ms: float
    clock_ms: float | None
    info: dict[str, Any] | None
    config: dict[str, str] | None
    survey: Survey | None
    workers: list[WorkerRow]
    unseen: dict[str, str]

    def told(self, name: str) -> Any:
        """A field of INFO. Raises Unseen."""
        if self.info is None or name not in self.info:
            raise Unseen(self.unseen.get("info", f"the server's INFO has no {name}"))
        return self.info[name]

    def setting(self, name: str) -> str:
        """A setting of the server. Raises Unseen."""
        if self.config is None or name not in self.config:
            raise Unseen(f"{name}: " + self.unseen.get("config", "the server has no such setting"))
        return self.config[name]

    def seen(self) -> Survey:
        """The queue. Raises Unseen."""
        if self.survey is None:
            raise Unseen(self.unseen.get("survey", "the queue"))
        return self.survey

    @property
    def alive(self) -> list[WorkerRow]:
        return [worker for worker in self.workers if worker.state == "alive"]


def gather(inspector: Inspector) -> Facts:
    """Reads everything once. Raises redis-py's errors only when the server cannot be reached."""
    redis, unseen = inspector.redis, dict[str, str]()
    ping_ms = _ping_ms(inspector)
    survey = attempt(inspector.survey, "survey", unseen)
    config = attempt(lambda: cast(dict[str, str], redis.config_get(*SETTINGS)), "config", unseen)
    return Facts(
        redis=redis,
        keys=inspector.keys,
        ping_ms=ping_ms,
        clock_ms=attempt(lambda: _clock_ms(redis), "clock", unseen),
        info=attempt(lambda: cast(dict[str, Any], redis.info()), "info", unseen),
        config=config and {_text(name): _text(value) for name, value in config.items()},
        survey=survey,
        workers=attempt(lambda: inspector.workers(survey), "workers", unseen) or [] if survey else [],
        unseen=unseen,
    )


def attempt(read: Callable[[], T], name: str, unseen: dict[str, str]) -> T | None:
    """What `read` returns; None, with the reason in `unseen`, when the server refuses to answer."""
    try:
        return read()
    except (RedisConnectionError, RedisTimeoutError):
        raise
    except RedisError as error:
        unseen[name] = f"cannot see it: {error}"
        return None


def _ping_ms(inspector: Inspector) -> float:
    times: list[float] = []
    for _ in range(PINGS):
        began = time.perf_counter()
        inspector.knock()
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times)[PINGS // 2]


def _clock_ms(redis: Redis) -> float:
    before = time.time()
    seconds, micros = cast(tuple[int, int], redis.time())
    return 1000 * (seconds + micros / 1e6 - (before + time.time()) / 2)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="backslashreplace")
