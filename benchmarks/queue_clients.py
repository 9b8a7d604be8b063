"""The clients of a run in one process: submit jobs, read all replies over one connection, note when tokens came.

`python -m benchmarks.queue_clients SPEC`, with a `Spec` as JSON, prints a `Summary` once every reply has ended. It
speaks to Redis by itself and looks at replies only as far as it must: a library's own time is none of the worker's.
"""

import re
import socket
import sys
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from benchmarks.queue_engine import Plan, index_of, job_id
from benchmarks.queue_stamps import Stamps
from gllm.keys import Keys

MESSAGES = [{"role": "user", "content": "Tell me in a few words why the sky is blue, and red in the evening."}]
MINUTE = 60.0
BLOCK_MS = 500
REST_SECONDS = 0.001  # after each answer: who writes entry by entry is not to be charged for as many reads
PONG = b"+PONG\r\n"
# What an XREAD's answer has of interest: which stream, then per entry its id and what the event says of tokens.
ANSWER = re.compile(
    rb":out:([\w.:-]+)\r\n"
    rb"|\r\n(\d+-\d+)\r\n\*2\r\n\$1\r\nd\r\n\$\d+\r\n\{\"type\":\"(\w+)\"(?:,\"from\":(\d+),\"at\":\d+,\"ids\":\[([\d,]*))?"
)


class Spec(Struct, frozen=True, kw_only=True):
    """`lengths`: tokens of each job, which are named job_id(run, index). `together`: all at once, else one by one, with
    `pause` seconds between.

    `submit`: whether to submit the jobs; else the plain writer writes their replies, `pipelined` or not. `plan`: where
    the stamps are.
    """

    url: str
    queue: str
    run: str
    lengths: list[int]
    plan: Plan
    together: bool = True
    pause: float = 0.0
    submit: bool = True
    pipelined: bool = False


class Summary(Struct, frozen=True):
    """`entries` are those with tokens."""

    entries: int
    tokens: int
    seconds: float


class Connection:
    """Raw commands to Redis. Raises OSError, also when nothing comes for a minute."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._socket = socket.create_connection((where.hostname, where.port), timeout=MINUTE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, *commands: bytes) -> tuple[bytes, float]:
        """All answers together, and the moment when the last byte of them was there."""
        self._socket.sendall(b"".join(commands) + packed(b"PING"))
        answer = bytearray()
        while not answer.endswith(PONG):
            chunk = self._socket.recv(1 << 20)
            if not chunk:
                raise ConnectionError("Redis has closed the connection")
            answer += chunk
        return bytes(answer), time.monotonic()


def packed(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Reader:
    """Reads replies until all have ended; each must come without a gap and without a repetition."""

    def __init__(self, connection: Connection, keys: Keys, stamps: Stamps) -> None:
        self._connection = connection
        self._keys = keys
        self._stamps = stamps
        self._names: dict[str, bytes] = {}
        self._last: dict[str, bytes] = {}  # entry ids
        self._read: dict[str, int] = {}
        self.entries = 0
        self.tokens = 0

    def read_all(self, ids: Iterable[str]) -> None:
        for name in ids:
            self._names[name] = packed(self._keys.out(name).encode()).removeprefix(b"*1\r\n")
            self._last[name], self._read[name] = b"0-0", 0
        while self._last:
            # Redis wakes a blocked XREAD with the first stream that has something; the same again, right behind it in
            # the pipeline, brings the others without another way there and back
            answer, now = self._connection.call(self._command(b"BLOCK", b"%d" % BLOCK_MS), self._command())
            self._take(answer, now)
            time.sleep(REST_SECONDS)

    def _command(self, *options: bytes) -> bytes:
        head = packed(b"XREAD", *options, b"STREAMS").partition(b"\r\n")[2]
        count = len(options) + 2 + 2 * len(self._last)
        places = b"".join(b"$%d\r\n%b\r\n" % (len(last), last) for last in self._last.values())
        return b"*%d\r\n" % count + head + b"".join(self._names[name] for name in self._last) + places

    def _take(self, answer: bytes, now: float) -> None:
        name = ""
        for match in ANSWER.finditer(answer):
            stream, entry, kind, first, ids = match.groups()
            if stream is not None:
                name = stream.decode()
            elif name in self._last and _place(entry) > _place(self._last[name]):
                self._last[name] = entry
                if kind == b"tokens":
                    self._tokens(name, int(first), ids.count(b",") + 1, now)
                else:
                    self._mark(name, kind, answer[match.end() : match.end() + 200], now)
        if answer.startswith(b"-"):
            raise RuntimeError(f"Redis says {answer[:200]!r}")

    def _mark(self, name: str, kind: bytes, text: bytes, now: float) -> None:
        """An event without tokens."""
        if kind == b"error":
            raise RuntimeError(f"job {name} ended with an error: {text!r}")
        if kind == b"done":
            del self._last[name]
        elif kind == b"start":
            self._stamps.view[self._stamps.started(index_of(name))] = now

    def _tokens(self, name: str, first: int, count: int, now: float) -> None:
        if first != self._read[name]:
            raise RuntimeError(f"job {name}: token {self._read[name]} expected, got {first}")
        start = self._stamps.read(index_of(name), first)
        for offset in range(count):
            self._stamps.view[start + offset] = now
        self._read[name] += count
        self.entries += 1
        self.tokens += count


def _place(entry: bytes) -> tuple[int, int]:
    first, _, second = entry.partition(b"-")
    return int(first), int(second)


class Clients:
    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._keys = Keys(spec.queue)
        self._stamps = spec.plan.open_stamps()
        self._connection = Connection(spec.url)
        self._reader = Reader(self._connection, self._keys, self._stamps)

    def run(self) -> Summary:
        began = time.monotonic()
        ids = [job_id(self._spec.run, index) for index in range(len(self._spec.lengths))]
        for some in [ids] if self._spec.together else [[name] for name in ids]:
            time.sleep(self._spec.pause)
            if self._spec.submit:
                self._submit(some)
            self._reader.read_all(some)
        return Summary(self._reader.entries, self._reader.tokens, time.monotonic() - began)

    def _submit(self, ids: list[str]) -> None:
        stream = self._keys.jobs("normal", 0).encode()
        bodies = [body_of(self._spec.lengths[index_of(name)]) for name in ids]
        named = zip(ids, bodies, strict=True)
        commands = [packed(b"XADD", stream, b"*", b"id", name.encode(), b"body", body) for name, body in named]
        now = time.monotonic()
        for name in ids:
            self._stamps.view[self._stamps.submitted(index_of(name))] = now
        self._connection.call(*commands)


def body_of(tokens: int) -> bytes:
    """A chat whose reply has so many tokens."""
    return msgspec.json.encode({"messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True})


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    print(msgspec.json.encode(Clients(spec).run()).decode())


if __name__ == "__main__":
    main()
