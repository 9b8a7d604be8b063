"""What happens before a worker serves: its model is found, Redis is waited for, the queue is joined."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import structlog
from msgspec import Struct
from redis.exceptions import RedisError

from engine.checkpoint import files_of, fingerprint
from gllm.connection import redact
from worker import logs
from worker.connection import cancelled, classify
from worker.defaults import sampling_defaults
from worker.models import resolve_model
from worker.queue import Queue
from worker.tokenizer import Tokenizer, load_tokenizer

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to reach Redis; there is no last attempt

T = TypeVar("T")


class Model(Struct, frozen=True):
    """A model's files and tokenizer, the digest of both, and the sampling defaults that jobs get from its authors."""

    path: Path
    tokenizer: Tokenizer
    digest: str
    defaults: dict[str, float] = {}


class RedisRefused(Exception):
    """An answer of Redis that no waiting will cure."""


def load_model(name: str, *, model_defaults: bool = False) -> Model:
    """Find a model and load its tokenizer; the engine loads the weights. Raises ModelError.

    `model_defaults`: take the sampling defaults of its generation_config.json.
    """
    path = resolve_model(name)
    tokenizer = load_tokenizer(path)
    defaults = sampling_defaults(path) if model_defaults else {}
    return Model(path, tokenizer, model_digest(path, tokenizer.digest, defaults), defaults)


def model_digest(path: Path, tokenizer_digest: str, defaults: Mapping[str, float] = MappingProxyType({})) -> str:
    """What all workers of a queue have in common: 32 hex digits of tokenizer, configuration, weights and defaults."""
    told = repr(sorted(defaults.items())) if defaults else ""
    return fingerprint(files_of(path), (tokenizer_digest + told).encode())


def begin_aside(function: Callable[[str], T], argument: str) -> tuple[threading.Thread, asyncio.Future[T]]:
    """Call in a thread that the end of the loop does not wait for, as it does for those of `asyncio.to_thread`."""
    outcome = Future[T]()
    outcome.set_running_or_notify_cancel()  # so that a cancelled wait leaves it to the thread

    def work() -> None:
        try:
            outcome.set_result(function(argument))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    return thread, asyncio.wrap_future(outcome)


async def join_queue(queue: Queue, url: str, model: str) -> None:
    """Wait for Redis, however long it takes, and join. Raises QueueMismatch or RedisRefused."""
    log, pause, attempt = structlog.get_logger(), FIRST_PAUSE, 0
    while not cancelled():
        attempt += 1
        try:
            groups = await queue.join(model)
            log.info(logs.REDIS_CONNECTED, redis=redact(url), queue=queue.keys.queue, groups_made=groups)
            return
        except (RedisError, OSError) as error:
            text = f"{type(error).__name__}: {error}"
            if classify(error) == "fatal":
                raise RedisRefused(f"{redact(url)}: {text}") from error
        if attempt & (attempt - 1) == 0:  # the 1st, 2nd, 4th, 8th … attempt: a long wait must not fill the log
            log.warning(logs.REDIS_WAITING, redis=redact(url), error=text, attempt=attempt, again_in=pause)
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)
