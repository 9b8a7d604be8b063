"""Every Redis key of a queue, and the shard function. The names are final: they are the wire contract.

All keys of one queue share the hash tag ``{<queue>}``, so that they live in one cluster slot and scripts stay legal.

| key                      | type   | content                                              |
| ------------------------ | ------ | ---------------------------------------------------- |
| jobs:<priority>:<shard>  | stream | an entry per submitted job; group ``workers``        |
| job:<id>                 | hash   | state, epoch, worker, attempts, claims, n, entry     |
| out:<id>                 | stream | reply events                                         |
| cancel:<id>              | string | a producer's wish to cancel                          |
| delayed                  | zset   | not-before in ms -> job id                           |
| dead                     | stream | dead letters                                         |
| bell                     | stream | rung by release, requeue and promote                 |
| workers, worker:<name>   | zset, hash | heartbeats                                       |
| meta                     | hash   | protocol version, shard count, model digest          |
"""

import re
from zlib import crc32

PRIORITIES = ("high", "normal", "low")
GROUP = "workers"
QUEUE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
JOB_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Keys:
    """The key names of one queue. Raises ValueError for a queue name outside ``[A-Za-z0-9._-]{1,64}``."""

    def __init__(self, queue: str = "default") -> None:
        if not QUEUE_NAME.fullmatch(queue):
            raise ValueError(f"queue: 1 to 64 characters of [A-Za-z0-9._-] expected, got {queue!r}")
        self.queue = queue
        self.base = f"gllm:{{{queue}}}:"
        self.delayed = self.base + "delayed"
        self.dead = self.base + "dead"
        self.bell = self.base + "bell"
        self.workers = self.base + "workers"
        self.meta = self.base + "meta"

    def jobs(self, priority: str, shard: int) -> str:
        return f"{self.base}jobs:{priority}:{shard}"

    def streams(self, shards: int) -> list[str]:
        """Every job stream, in scan order: high, normal, low; shard by shard within each."""
        return [self.jobs(priority, shard) for priority in PRIORITIES for shard in range(shards)]

    def job(self, job_id: str) -> str:
        return f"{self.base}job:{job_id}"

    def out(self, job_id: str) -> str:
        return f"{self.base}out:{job_id}"

    def cancel(self, job_id: str) -> str:
        return f"{self.base}cancel:{job_id}"

    def worker(self, name: str) -> str:
        return f"{self.base}worker:{name}"


def shard_of(affinity_or_id: str, shards: int) -> int:
    """The shard of a job: CRC-32 of its affinity (or id), modulo the queue's shard count."""
    return crc32(affinity_or_id.encode()) % shards
