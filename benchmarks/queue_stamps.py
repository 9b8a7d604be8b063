"""Moments that several processes note down in one file: when a token left the engine, when a client had it.

All are `time.monotonic()` in seconds, which is one clock for all processes of a machine. 0.0: not yet.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import cast

BYTES = 8
PHASES = 4  # columns of a job, before those of its tokens


class Stamps:
    """One row a job: `submitted`, `claimed`, `added` (its request reached the engine), `started` (a client has its
    start), then per token the moment it left the engine and the moment a client had read it.
    """

    def __init__(self, path: Path, jobs: int, tokens: int) -> None:
        """The file is made, filled with zeros, when it is not there."""
        self.jobs, self.tokens = jobs, tokens
        size = jobs * (PHASES + 2 * tokens) * BYTES
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self.view: memoryview[float] = memoryview(mmap.mmap(file.fileno(), size)).cast("d")

    def clear(self) -> None:
        self.view[:] = cast("memoryview[float]", memoryview(bytes(len(self.view) * BYTES)).cast("d"))

    def submitted(self, job: int) -> int:
        """The index in `view`; so do the others below."""
        return job * (PHASES + 2 * self.tokens)

    def claimed(self, job: int) -> int:
        return self.submitted(job) + 1

    def added(self, job: int) -> int:
        return self.submitted(job) + 2

    def started(self, job: int) -> int:
        return self.submitted(job) + 3

    def left(self, job: int, token: int) -> int:
        return self.submitted(job) + PHASES + token

    def read(self, job: int, token: int) -> int:
        return self.submitted(job) + PHASES + self.tokens + token

    def all_read(self, jobs: int, token: int) -> bool:
        """Whether a client has this token of each of the first jobs."""
        return all(self.view[self.read(job, token)] for job in range(jobs))

    def waits(self, first: float, last: float, jobs: int) -> Iterator[float]:
        """Seconds from engine to client of every token of the first jobs that left between two moments.

        Raises where one is missing.
        """
        for job in range(jobs):
            for token in range(self.tokens):
                left, read = self.view[self.left(job, token)], self.view[self.read(job, token)]
                if first <= left < last:
                    if not read:
                        raise RuntimeError(f"no client has read token {token} of job {job}")
                    yield read - left
