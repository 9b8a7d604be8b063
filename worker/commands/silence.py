"""What is said to a person who waits for a reply of which nothing has come yet."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from worker.commands.access import inspected
from worker.humane import counted
from worker.terminal import one_line

if TYPE_CHECKING:
    from gllm.reply import Reply
    from gllm.sync import SyncClient
    from worker.inspection.inspector import Inspector

SILENT_SECONDS = 5.0  # then a person wants to know whether anybody is at it


def replies(client: "SyncClient", job_id: str, last_id: str, redis: str | None, queue: str | None) -> "Iterator[Reply]":
    """The events of a reply; when none has come for a while, standard error tells why, and the wait goes on."""
    entry, characters = last_id, None
    try:
        for reply in client.stream(job_id, last_id, timeout=SILENT_SECONDS):
            entry, characters = reply.entry, reply.characters
            yield reply
    except TimeoutError:
        if entry == last_id:
            click.echo(f"{_why(job_id, redis, queue)}; still waiting", err=True)
        yield from client.stream(job_id, entry, characters=characters)


def _why(job_id: str, redis: str | None, queue: str | None) -> str:
    try:
        with inspected(redis, queue) as inspector:
            return _told(inspector, job_id)
    except click.ClickException as error:  # a producer may be forbidden to look
        return f"no event of job {job_id} yet ({one_line(error.message)})"


def _told(inspector: "Inspector", job_id: str) -> str:
    queue, view, alive = inspector.keys.queue, inspector.job(job_id), inspector.queue().workers_alive
    serving = f"{counted(alive, 'worker')} alive" if alive else "no worker alive"
    if view is None:
        return f"queue {queue} knows no job {job_id}: never submitted to it, or its reply is no longer kept ({serving})"
    return f"job {job_id} is {view.state} in queue {queue} ({serving})"
