"""What the tests of the queue say often: submit, claim as some worker, publish, look at a reply."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis

from gllm.keys import GROUP, Keys
from gllm.protocol import Done, ReplyEvent, Timings, Tokens, Usage, decode_event, encode_event
from worker.queue import Claimed, ClaimReply, Queue
from worker.rows import Answer, AppendRow, FinishRow

MODEL = "digest"
SECONDS = 30.0  # the bound of every wait: a busy machine may start a process in ten
DONE = encode_event(Done(finish_reason="stop", stop=None, text="", usage=Usage(), timings=Timings()))


class QueueBench:
    """One queue on a real server, and as many workers as a test needs."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis = redis
        self.keys = keys

    async def worker(self, name: str = "w1", *, lease: float = 1.0, **options: Any) -> Queue:
        """A worker that has joined and has a heartbeat; it scans for expired entries at each claim."""
        queue = Queue(
            self.redis, self.keys, name, lease=lease, scan_seconds=options.pop("scan_seconds", 0.0), **options
        )
        await queue.join(MODEL)
        await queue.renew([], {})
        await self.redis.hdel(self.keys.meta, "quiet_from", "quiet_until")  # a queue's first heartbeat asks for it
        return queue

    async def submit(self, job_id: str, priority: str = "normal", **fields: Any) -> str:
        """XADD as any producer would; the entry id. `body=None` leaves it out."""
        entry = {"id": job_id, "body": "{}", **fields}
        stream = self.keys.jobs(priority, 0)
        return (await self.redis.xadd(stream, {k: v for k, v in entry.items() if v is not None})).decode()

    async def claimed(self, queue: Queue, want: int = 16, active: tuple[str, ...] = ()) -> list[Claimed]:
        queue.scan_soon()
        return (await queue.claim(want, active)).jobs

    async def one(self, queue: Queue, job_id: str = "a", **fields: Any) -> Claimed:
        """Submit a job and claim it."""
        await self.submit(job_id, **fields)
        (job,) = await self.claimed(queue)
        return job

    async def events(self, job_id: str) -> list[ReplyEvent]:
        return [decode_event(fields[b"d"]) for _, fields in await self.redis.xrange(self.keys.out(job_id))]

    async def entries(self, job_id: str) -> list[str]:
        return [entry.decode() for entry, _ in await self.redis.xrange(self.keys.out(job_id))]

    async def letters(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in await self.redis.xrange(self.keys.dead)]

    async def pending(self, priority: str = "normal") -> int:
        return (await self.redis.xpending(self.keys.jobs(priority, 0), GROUP))["pending"]

    async def clear_streams(self) -> None:
        """Nothing is left waiting or pending."""
        for stream in self.keys.streams(1):
            assert await self.redis.xlen(stream) == 0, stream
            assert (await self.redis.xpending(stream, GROUP))["pending"] == 0, stream

    async def field(self, job_id: str, name: str) -> str | None:
        value = await self.redis.hget(self.keys.job(job_id), name)
        return None if value is None else value.decode()

    async def die(self, queue: Queue) -> None:
        """As if the worker had been killed a lease ago: its heartbeat is old, its entries are idle."""
        await self.redis.zadd(self.keys.workers, {queue.worker: await now_ms(self.redis) - 2 * queue.lease_ms})
        await self.idle(queue)

    async def idle(self, queue: Queue) -> None:
        """As if the worker had renewed nothing for two leases."""
        for stream in self.keys.streams(1):
            for item in await self.redis.xpending_range(stream, GROUP, "-", "+", 1000, queue.worker):
                entry, idle = item["message_id"], 2 * queue.lease_ms
                await self.redis.xclaim(stream, GROUP, queue.worker, 0, [entry], idle=idle, justid=True)


def tokens(job: Claimed, first: int, to: int) -> AppendRow:
    ids = list(range(first, to))
    event = Tokens(first=first, at=first, ids=ids, text="x" * len(ids))
    return AppendRow("tokens", job.id, job.epoch, first, to, encode_event(event))


def finish_row(job: Claimed, n: int) -> FinishRow:
    return FinishRow(job.id, job.epoch, n, job.stream, job.entry, DONE)


async def publish(queue: Queue, job: Claimed, first: int, to: int) -> Answer:
    (answer,) = await queue.append([tokens(job, first, to)])
    return answer


async def finish(queue: Queue, job: Claimed, n: int) -> Answer:
    (answer,) = await queue.finish([finish_row(job, n)])
    return answer


def kinds(reply: ClaimReply) -> list[str]:
    return [note.kind for note in reply.notes]


async def now_ms(redis: Redis) -> int:
    seconds, micros = await redis.time()
    return seconds * 1000 + micros // 1000


async def until(condition: Callable[[], Awaitable[object]], what: str, seconds: float = SECONDS) -> Any:
    """Wait for a truthy result of `condition`, and return it."""
    end = time.monotonic() + seconds
    while not (result := await condition()):
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        await asyncio.sleep(0.01)
    return result
