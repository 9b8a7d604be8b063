"""A whole producer for gllm in one file: redis-py and the standard library, nothing of ours. See docs/protocol.md.

    python producer.py "The capital of France is" --max-tokens 32
    python producer.py "Once upon a time" --id story-1     # again with the same id: the same job, read from its start

Ctrl-C cancels the job.
"""

import argparse
import json
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, OutOfMemoryError, ReadOnlyError
from redis.retry import Retry

# What passes by itself: a server that is away, starting, failing over or full.
AWAY = (redis.ConnectionError, redis.TimeoutError, ClusterDownError, OutOfMemoryError, ReadOnlyError)
PATIENCE = 60.0  # seconds in a row that Redis may be away
BLOCK_MS = 1000  # of one read; the socket's timeout must be longer


class Reply:
    """What was read of a reply so far. An event may repeat what is known: that is compared and dropped."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.characters = 0
        self.ended = False

    def add(self, event: dict[str, Any]) -> str:
        """The text that an event adds."""
        if event["type"] == "error":
            raise RuntimeError(f"{event['code']}: {event['message']}")
        if event["type"] == "done":
            if event["usage"]["completion_tokens"] != len(self.ids):
                raise RuntimeError(f"the reply ended with other tokens than the {len(self.ids)} that were read")
            self.ended = True
            return event["text"]  # what was held back: it might have begun a stop string
        return self._tokens(event) if event["type"] == "tokens" else ""

    def _tokens(self, event: dict[str, Any]) -> str:
        start, ids = event["from"], event["ids"]
        known = len(self.ids) - start
        if known < 0 or ids[:known] != self.ids[start : start + len(ids)]:
            raise RuntimeError(f"a hole, or another reply than the one read before, at token {start}")
        if not ids[known:]:
            return ""
        text = event["text"][self.characters - event["at"] :]
        self.ids += ids[known:]
        self.characters += len(text)
        return text


class Producer:
    """Submits jobs to one queue, reads their replies, cancels them."""

    def __init__(self, url: str, queue: str = "default") -> None:
        # The library must not repeat commands on its own: what may be repeated is decided here.
        once = Retry(NoBackoff(), 0)
        self.redis: Any = redis.Redis.from_url(url, protocol=2, decode_responses=True, socket_timeout=10, retry=once)
        self.base = f"gllm:{{{queue}}}:"
        self.away_since: float | None = None

    def submit(self, job: dict[str, Any], job_id: str, priority: str = "normal", seconds: float | None = None) -> None:
        """Add a job, with a deadline in so many seconds. May be repeated: a queue takes an id once."""
        entry = {"id": job_id, "body": json.dumps(job), "v": 1}
        if seconds is not None:
            entry["deadline"] = self.patiently(self.now_ms) + round(1000 * seconds)
        shards = int(self.patiently(lambda: self.redis.hget(f"{self.base}meta", "shards")) or 1)
        stream = f"{self.base}jobs:{priority}:{zlib.crc32(job_id.encode()) % shards}"
        self.patiently(lambda: self.redis.xadd(stream, entry))

    def stream(self, job_id: str) -> Iterator[str]:
        """The text of the reply, each character once, whatever happens to a connection or to a worker."""
        reply, last = Reply(), "0-0"
        while not reply.ended:
            try:
                entries = self.read(job_id, last)
            except AWAY as error:
                self.wait(error)
                last = "0-0"  # another server may answer now: compare what it has with what was read
                continue
            for last, event in entries:  # noqa: B007 (the place to read on from)
                yield reply.add(event)

    def read(self, job_id: str, last: str) -> list[tuple[str, dict[str, Any]]]:
        """The events behind the entry `last`; waits a little for the first one."""
        job, out = f"{self.base}job:{job_id}", f"{self.base}out:{job_id}"
        found = self.redis.xread({out: last}, count=100, block=BLOCK_MS)
        if not found and self.redis.hget(job, "state") == "ended" and not self.redis.exists(out):
            raise RuntimeError("the job has ended and its reply is no longer kept")
        self.away_since = None
        return [(entry, json.loads(fields["d"])) for _, entries in found for entry, fields in entries]

    def cancel(self, job_id: str) -> None:
        """Ask for the end of a job; its reply then ends with `done`. One that has ended is left alone."""
        if self.patiently(lambda: self.redis.hget(f"{self.base}job:{job_id}", "state")) != "ended":
            self.patiently(lambda: self.redis.set(f"{self.base}cancel:{job_id}", 1, ex=86400))

    def now_ms(self) -> int:
        """Redis' clock, which deadlines are measured by."""
        seconds, micros = self.redis.time()
        return seconds * 1000 + micros // 1000

    def patiently(self, command: Callable[[], Any]) -> Any:
        """Run a command that may be repeated until it works."""
        while True:
            try:
                result = command()
            except AWAY as error:
                self.wait(error)
            else:
                self.away_since = None
                return result

    def wait(self, error: Exception) -> None:
        """Before the next try. Raises the error when Redis has been away for too long."""
        if self.away_since is None:
            self.away_since = time.monotonic()
            print(f"Redis: {error}; trying on for {PATIENCE:g} s", file=sys.stderr)
        if time.monotonic() - self.away_since > PATIENCE:
            raise error
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Submit a prompt to gllm and stream the reply.")
    parser.add_argument("prompt")
    parser.add_argument("--redis", default="redis://localhost:6379/0")
    parser.add_argument("--queue", default="default")
    parser.add_argument("--id", default=uuid.uuid4().hex, help="default: a random one")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--deadline", type=float, help="seconds from now")
    given = parser.parse_args()
    producer = Producer(given.redis, given.queue)
    producer.submit({"prompt": given.prompt, "max_tokens": given.max_tokens}, given.id, seconds=given.deadline)
    try:
        for text in producer.stream(given.id):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        producer.cancel(given.id)
    print()


if __name__ == "__main__":
    try:
        main()
    except (redis.RedisError, RuntimeError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
