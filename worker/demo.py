"""`gllm demo`: a Redis, one real worker and eight chats at once, streamed live; then a table of what it took."""

import asyncio
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import click
from msgspec import Struct
from redis.exceptions import RedisError

from gllm.client import Client
from gllm.connection import connect_sync, redact
from gllm.keys import Keys
from gllm.reply import ReplyError
from worker.demo_chats import QUESTIONS, Chat, prompt
from worker.demo_screen import Screen, screen_for, table
from worker.demo_worker import DemoFailed, DemoWorker
from worker.embedded import EmbeddedServerError, embedded_server

SILENCE_SECONDS = 300.0  # a slow machine may think this long before its next token
INTERRUPTED = 130


class DemoOptions(Struct, frozen=True, kw_only=True):
    """`redis`: a URL, or None for an embedded server."""

    model: str
    device: str
    dtype: str
    redis: str | None
    max_tokens: int
    plain: bool


def run(options: DemoOptions) -> int:
    """The exit status: 0 only if every chat and the worker ended well. If not, its directory with the logs stays."""
    directory = Path(tempfile.mkdtemp(prefix="gllm-demo-"))
    before = signal.signal(signal.SIGTERM, _interrupt)  # else a terminated demo would leave worker and server running
    status = 1
    try:
        status = _demo(options, directory)
    except (DemoFailed, EmbeddedServerError, RedisError, ReplyError, TimeoutError) as error:
        click.echo(f"Error: {error or type(error).__name__}", err=True)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        status = INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    if status == 1:
        click.echo(f"The logs are in {directory}", err=True)
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return status


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _demo(options: DemoOptions, directory: Path) -> int:
    keys = Keys(f"demo-{secrets.token_hex(6)}")
    chats = [Chat(number, question) for number, question in enumerate(QUESTIONS, start=1)]
    with _redis(options.redis, directory) as url, _swept(url, keys, chats):
        worker = DemoWorker(options.model, options.device, options.dtype, url, keys.queue, directory / "worker.log")
        with worker:
            asyncio.run(_serve(options, url, keys.queue, worker, chats))
        click.echo(table(chats))
        return _verdict(chats, worker)


def _verdict(chats: list[Chat], worker: DemoWorker) -> int:
    failed = [chat for chat in chats if not chat.well]
    for chat in failed:
        click.echo(f"Error: chat {chat.number} ended with {chat.outcome}", err=True)
    if worker.status != 0:
        click.echo(f"Error: the worker ended with status {worker.status}", err=True)
    return 1 if failed or worker.status != 0 else 0


@contextmanager
def _redis(url: str | None, directory: Path) -> Iterator[str]:
    if url is None:
        with embedded_server(directory) as embedded:
            click.echo(f"Redis: an embedded server on {embedded}")
            yield embedded
        return
    try:
        with connect_sync(url) as client:
            client.ping()
    except RedisError as error:
        raise DemoFailed(f"Redis at {redact(url)}: {error}") from None
    click.echo(f"Redis: {redact(url)}")
    yield url


@contextmanager
def _swept(url: str, keys: Keys, chats: list[Chat]) -> Iterator[None]:
    """Takes the demo's queue away again: on somebody's own Redis its permanent keys would stay for ever."""
    try:
        yield
    finally:
        jobs = [chat.job_id for chat in chats if chat.job_id]
        own = [name for job in jobs for name in (keys.job(job), keys.out(job), keys.cancel(job))]
        with suppress(RedisError), connect_sync(url, queue=keys.queue) as client:
            client.delete(keys.meta, keys.bell, keys.dead, keys.delayed, keys.workers, *keys.streams(1), *own)


async def _serve(options: DemoOptions, url: str, queue: str, worker: DemoWorker, chats: list[Chat]) -> None:
    """Waits for the worker, then runs all chats; a worker that ends in between ends the demo."""
    started = time.monotonic()
    click.echo(f"Starting a worker with {options.model} …")
    await worker.ready(click.echo)
    click.echo(f"Ready after {time.monotonic() - started:.1f} s. In another terminal, as long as this runs:\n")
    click.echo(f"    gllm top --redis {redact(url)} --queue {queue}\n")
    click.echo(
        "Eight chats share one long system prompt. The first goes ahead alone until its first token: only then is"
    )
    click.echo(
        "that prompt in the prefix cache, where the other seven find it. (Small models are quick, and often wrong.)\n"
    )
    async with Client(url, queue) as client:
        serving = asyncio.create_task(_all_chats(client, chats, options))
        watching = asyncio.create_task(worker.ended())
        try:
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise DemoFailed(f"the worker ended with status {watching.result()}: {worker.last_words()}")
            serving.result()
        finally:
            serving.cancel()
            watching.cancel()
            await asyncio.gather(serving, watching, return_exceptions=True)


async def _all_chats(client: Client, chats: list[Chat], options: DemoOptions) -> None:
    first, *others = chats
    with screen_for(chats, plain=options.plain) as screen:
        tasks = [asyncio.create_task(_one_chat(client, first, screen, options.max_tokens))]
        try:
            await first.began.wait()
            tasks += [asyncio.create_task(_one_chat(client, chat, screen, options.max_tokens)) for chat in others]
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def _one_chat(client: Client, chat: Chat, screen: Screen, max_tokens: int) -> None:
    chat.submitted = time.monotonic()
    try:
        chat.job_id = await client.submit(messages=prompt(chat.question), max_tokens=max_tokens, temperature=0.0)
        async for reply in client.stream(chat.job_id, timeout=SILENCE_SECONDS):
            chat.take(reply.event, time.monotonic())
            screen.show(chat)
    finally:
        chat.began.set()
