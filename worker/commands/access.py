"""How a command reaches its queue. What the outside can cause becomes a one-line error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from worker.commands.options import resolved
from worker.terminal import one_line

if TYPE_CHECKING:
    from gllm.sync import SyncClient
    from worker.inspection.inspector import Inspector


@contextmanager
def connected(redis: str | None, queue: str | None) -> Iterator["SyncClient"]:
    """A client of the queue that flags and environment name."""
    settings = resolved({"redis": redis, "queue": queue}, "redis", "queue").settings
    from gllm.sync import SyncClient

    with inspected(redis, queue) as inspector:
        inspector.knock()  # a client bears with an absent Redis for a minute; a person at a terminal should not have to
    with one_line_errors(settings.redis), SyncClient(settings.redis, settings.queue) as client:
        yield client


@contextmanager
def inspected(redis: str | None, queue: str | None) -> Iterator["Inspector"]:
    """A reader of the queue that flags and environment name."""
    settings = resolved({"redis": redis, "queue": queue}, "redis", "queue").settings
    from gllm.connection import connect_sync
    from gllm.keys import Keys
    from worker.inspection.inspector import Inspector

    with (
        one_line_errors(settings.redis),
        connect_sync(settings.redis, queue=settings.queue, name="gllm-inspector") as client,
    ):
        yield Inspector(client, Keys(settings.queue))


@contextmanager
def one_line_errors(url: str) -> Iterator[None]:
    """Turns the errors of Redis and of our own client into click's, which end a command with one line."""
    from redis.exceptions import RedisError

    from gllm.client import NotReplicated, QueueFull
    from gllm.connection import redact
    from gllm.reply import ReplyError

    try:
        yield
    except RedisError as error:
        raise click.ClickException(one_line(f"Redis at {redact(url)}: {error}")) from None
    except (ValueError, ReplyError, QueueFull, NotReplicated) as error:
        raise click.ClickException(one_line(str(error))) from None
