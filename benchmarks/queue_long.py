"""Prompts of some megabytes, one after the other, for a worker that has streams to serve."""

import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from benchmarks.queue_engine import job_id
from benchmarks.queue_processes import Bench
from gllm.keys import Keys

LIMIT = 1 << 21  # tokens that the engine's stand-in takes: two megabytes of such words are 1.1 million
LETTERS = b"etaoinshrdlu      .,\n"
POLL_SECONDS = 0.02
END_SECONDS = 60.0


def prose(size: int, seed: int) -> str:
    """Words of all lengths, few of them twice: a tokenizer remembers how it cut a word before."""
    return bytes(random.Random(seed).choices(LETTERS, k=size)).decode()


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that does nothing but compute: what any work on this machine costs the streams."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


class LongPrompts:
    """A thread that submits such jobs, as text and as a chat in turns, while it is entered. `index` is their stamp."""

    def __init__(self, bench: Bench, keys: Keys, index: int, size: int) -> None:
        self._bench, self._keys, self._index = bench, keys, index
        self._texts = [prose(size, seed) for seed in range(4)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="long prompts")
        self.seconds: list[float] = []  # from submission to end, of each
        self.error: Exception | None = None

    def __enter__(self) -> "LongPrompts":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def median(self) -> float:
        return statistics.median(self.seconds)

    def _run(self) -> None:
        try:
            while not self._stop.is_set() or not self.seconds:
                self._one(len(self.seconds))
        except Exception as error:  # raised where the thread was started
            self.error = error

    def _one(self, number: int) -> None:
        text, name = self._texts[number % len(self._texts)], job_id(f"long{self._bench.name()}", self._index)
        source = {"prompt": text} if number % 2 else {"messages": [{"role": "user", "content": text}]}
        body = msgspec.json.encode(source | {"max_tokens": 1, "ignore_eos": True})
        began = time.monotonic()
        self._bench.redis.xadd(self._keys.jobs("normal", 0), {"id": name, "body": body})
        while self._bench.redis.hget(self._keys.job(name), "state") != b"ended":
            if time.monotonic() > began + END_SECONDS:
                raise TimeoutError(f"a prompt of {len(text)} bytes has not ended in {END_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        self.seconds.append(time.monotonic() - began)
        self._bench.redis.delete(self._keys.job(name), self._keys.out(name))
