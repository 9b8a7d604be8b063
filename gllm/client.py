"""The asyncio client of a producer: submit a job, read its reply as it is written, cancel it."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from gllm.connection import connect
from gllm.entry import When, checked_id, checked_labels, checked_priority, checked_times, one_job
from gllm.faults import Patience
from gllm.keys import Keys, shard_of
from gllm.protocol import TERMINAL_ENTRY_ID, VERSION, Job, ReplyEvent
from gllm.reply import Assembly, Cursor, Reply, ReplyExpired, Result, read_entry
from gllm.tasks import cancellable
from gllm.validate import encoded

BLOCK_SECONDS = 2.0  # one blocking read; between two of them an expired reply and a passed timeout are noticed
READ_MARGIN_SECONDS = 5.0  # a blocking read that is this late has lost its connection
READ_ENTRIES = 128  # per read, so that a long reply is not held in memory twice
SHARDS_SECONDS = 60.0  # how long the queue's shard count is believed
CANCEL_SECONDS = 24 * 3600  # a wish to cancel is forgotten with the job's record; a delayed job's wait comes on top
REPLICAS_SECONDS = 2.0  # how long replicas have to say that they have a job; below the socket's timeout

T = TypeVar("T")
Entry = tuple[bytes, dict[bytes, Any]]


class QueueFull(RuntimeError):
    """The queue holds as many unfinished jobs as the client's `max_queue` allows; nothing was submitted."""


class NotReplicated(RuntimeError):
    """The job `id` is submitted, but only `acknowledged` replicas have it, fewer than were wanted."""

    def __init__(self, job_id: str, acknowledged: int, wanted: int) -> None:
        super().__init__(
            f"job {job_id} is submitted, but {acknowledged} of {wanted} replicas acknowledged it within "
            f"{REPLICAS_SECONDS:g} seconds; submitting it again with this id is safe"
        )
        self.id = job_id
        self.acknowledged = acknowledged


class Client:
    """Submits jobs to one queue and reads their replies. Use it as an async context manager, from one event loop.

    `max_queue`: refuse to submit while the queue holds this many unfinished jobs (a soft limit: producers do not wait
    for each other). `patience`: how many seconds in a row a lost Redis is borne with before its error is raised.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        queue: str = "default",
        *,
        max_queue: int | None = None,
        patience: float = 60.0,
    ) -> None:
        self._keys = Keys(queue)
        self._redis = connect(url, queue=queue, name="gllm-client")
        reading = BLOCK_SECONDS + READ_MARGIN_SECONDS
        self._reader = connect(url, queue=queue, socket_timeout=reading, name="gllm-reader")
        self._max_queue = max_queue
        self._patience = patience
        self._shards = (0, -SHARDS_SECONDS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._redis.aclose()
        await self._reader.aclose()

    async def submit(
        self,
        job: Job | None = None,
        *,
        id: str | None = None,  # noqa: A002 (the protocol's word)
        priority: str = "normal",
        deadline: When | None = None,
        not_before: When | None = None,
        affinity: str | None = None,
        tenant: str | None = None,
        traceparent: str | None = None,
        wait_replicas: int = 0,
        **fields: Any,
    ) -> str:
        """Adds a job, given as a `Job` or as its fields (`prompt=…`, `messages=…` or `token_ids=…`); returns its id.

        Submitting again with the same id is always safe: the queue takes an id once. `deadline` and `not_before` are
        Unix milliseconds, an aware datetime, or a timedelta from now on Redis' clock. Jobs of one `affinity` go to one
        shard. `wait_replicas`: return when so many replicas of Redis have the job as well, so that a failover to one
        of them keeps it.

        Raises InvalidJob, QueueFull, NotReplicated (the job is submitted then), and redis-py's errors once the
        client's patience is over.
        """
        body = encoded(one_job(job, fields))
        job_id = checked_id(secrets.token_hex(16) if id is None else id)
        labels = checked_labels(affinity=affinity, tenant=tenant, traceparent=traceparent)
        times = checked_times(deadline=deadline, not_before=not_before)
        entry = {"id": job_id, "body": body, **labels, **times, "v": VERSION}
        await self._submit(checked_priority(priority), affinity or job_id, entry, wait_replicas)
        return job_id

    async def stream(
        self,
        id: str,  # noqa: A002 (the protocol's word)
        last_id: str = "0-0",
        *,
        characters: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (it bounds the silence between events, not the whole call)
    ) -> AsyncGenerator[Reply]:
        """The events of a reply as they are written, up to and with the terminal one.

        A reader that was interrupted goes on behind `last_id`, the `entry` of the last event it has dealt with
        (`characters` of that event makes this exact even when the stream was rewritten in between). `timeout`: seconds
        without an event after which TimeoutError is raised. Without it, a reply that nobody writes is waited for for
        ever: an id that was never submitted looks like a job that no worker has taken yet.

        Lost connections heal unnoticed, for at most the client's patience. Raises Rewound, Hole and ReplyExpired.
        """
        cursor, job_id = Cursor(last_id, characters), checked_id(id)
        patience = Patience(self._patience)
        start, block, heard = "0-0", 0.0, time.monotonic()
        reader = self._reader.client()  # its own connection: one of the pool may have been renewed without our noticing
        try:
            while not cursor.ended:
                try:
                    events = await cancellable(self._read(reader, job_id, start, block))
                except RedisError as error:
                    _next_block(heard, timeout)
                    await patience.wait(error)
                    start = "0-0"  # another server may answer now: compare what it has with what was read
                    continue
                patience.reset()
                for start, event in events:
                    if reply := cursor.take(start, event):
                        yield reply
                        heard = time.monotonic()
                block = _next_block(heard, timeout)
        finally:
            await reader.aclose()

    async def result(
        self,
        id: str,  # noqa: A002 (the protocol's word)
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (the sync client passes it on)
    ) -> Result:
        """The whole reply, once it has ended. `timeout` in seconds is for all of it.

        Raises JobFailed for a job that ended with an error, TimeoutError, and what `stream` raises.
        """
        assembly = Assembly(id)
        async with asyncio.timeout(timeout):
            async for reply in self.stream(id):
                assembly.add(reply)
        return assembly.result()

    async def cancel(self, id: str) -> bool:  # noqa: A002 (the protocol's word)
        """Asks for the end of a job. False when it has ended already; also true for an id that nobody knows (yet)."""
        job_id = checked_id(id)
        return await self._healed(lambda: self._wish_cancel(job_id))

    async def _healed(self, command: Callable[[], Awaitable[T]]) -> T:
        """Runs an idempotent command until it works or the client's patience is over."""
        patience = Patience(self._patience)
        while True:
            try:
                return await cancellable(command())
            except RedisError as error:
                await patience.wait(error)

    async def _submit(self, priority: str, shard_key: str, entry: dict[str, Any], replicas: int) -> None:
        """The limit is asked for before the first try only: afterwards our own entry may be there unknown to us."""
        entry = await self._on_redis_clock(entry)
        shards = await self._healed(self._shard_count)
        await self._healed(lambda: self._refuse_when_full(shards))
        stream = self._keys.jobs(priority, shard_of(shard_key, shards))
        await self._healed(lambda: self._add(stream, entry, replicas))

    async def _add(self, stream: str, entry: dict[str, Any], replicas: int) -> None:
        """XADD, and on the same connection WAIT, which counts what that connection has written."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xadd(stream, cast(Any, entry))
        if replicas:
            pipeline.wait(replicas, int(REPLICAS_SECONDS * 1000))  # pyright: ignore[reportUnknownMemberType]
        _, *acknowledged = await _answers(pipeline)
        if acknowledged and acknowledged[0] < replicas:
            raise NotReplicated(entry["id"], acknowledged[0], replicas)

    async def _shard_count(self) -> int:
        count, asked = self._shards
        if time.monotonic() - asked >= SHARDS_SECONDS:
            count = int(await self._redis.hget(self._keys.meta, "shards") or 1)
            self._shards = (count, time.monotonic())
        return count

    async def _refuse_when_full(self, shards: int) -> None:
        if self._max_queue is None:
            return
        pipeline = self._redis.pipeline(transaction=False)
        for stream in self._keys.streams(shards):
            pipeline.xlen(stream)
        pipeline.zcard(self._keys.delayed)  # those that wait for their time are in no stream meanwhile
        unfinished = sum(await _answers(pipeline))
        if unfinished >= self._max_queue:
            raise QueueFull(f"queue {self._keys.queue}: {unfinished} unfinished jobs, max_queue is {self._max_queue}")

    async def _on_redis_clock(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Makes moments of the times that are given as a wait from now."""
        waits = {name: when for name, when in entry.items() if isinstance(when, timedelta)}
        now_ms = await self._healed(self._now_ms) if waits else 0
        return entry | {name: now_ms + int(wait.total_seconds() * 1000) for name, wait in waits.items()}

    async def _now_ms(self) -> int:
        seconds, micros = await self._redis.time()  # pyright: ignore[reportUnknownMemberType]
        return seconds * 1000 + micros // 1000

    async def _read(self, reader: Redis, job_id: str, start: str, block: float) -> list[tuple[str, ReplyEvent]]:
        """The entries behind `start`; waits up to `block` seconds for one (0: does not wait)."""
        out = self._keys.out(job_id)
        reply = await reader.xread({out: start}, READ_ENTRIES, max(1, int(block * 1000)) if block else None)
        if not reply:
            await self._refuse_expired(job_id)
            return []
        return [read_entry(entry, fields) for entry, fields in cast(list[tuple[bytes, list[Entry]]], reply)[0][1]]

    async def _refuse_expired(self, job_id: str) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hget(self._keys.job(job_id), "state")
        pipeline.xrange(self._keys.out(job_id), TERMINAL_ENTRY_ID, TERMINAL_ENTRY_ID)
        state, end = await _answers(pipeline)
        if state == b"ended" and not end:  # nor is there one in a stream that a failover has set back
            raise ReplyExpired(f"job {job_id} has ended and its reply is no longer kept")

    async def _wish_cancel(self, job_id: str) -> bool:
        """The wish is set before the state is looked at: a job that ends in between takes the wish with it."""
        wish = self._keys.cancel(job_id)
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(wish, 1, ex=CANCEL_SECONDS)
        pipeline.hget(self._keys.job(job_id), "state")
        pipeline.zscore(self._keys.delayed, job_id)
        _, state, due_ms = await _answers(pipeline)
        if state == b"ended":
            await self._redis.delete(wish)
        elif due_ms is not None:  # a wish that was taken meanwhile stays gone
            await self._redis.pexpireat(wish, int(due_ms) + 1000 * CANCEL_SECONDS)
        return state != b"ended"


async def _answers(pipeline: Pipeline) -> list[Any]:
    """Raises the first error as the server said it: redis-py would put the whole command before it."""
    answers = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, RedisError):
            raise answer
    return answers


def _next_block(heard: float, timeout: float | None) -> float:
    if timeout is None:
        return BLOCK_SECONDS
    left = heard + timeout - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"no event of the reply for {timeout:g} seconds")
    return min(left, BLOCK_SECONDS)
