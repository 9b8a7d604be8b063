"""Many streams at once: how long a token takes from the engine to its client, and what that costs whom."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from benchmarks.figure import Figure
from benchmarks.queue_clients import Spec
from benchmarks.queue_engine import job_id
from benchmarks.queue_long import LIMIT, LongPrompts, busy_neighbour
from benchmarks.queue_processes import Bench, Cost, Running, Worker, clients, wait_until
from gllm.keys import Keys

RATE = 50  # tokens a second of each stream
START_SECONDS = 20.0
PLAIN = {False: "an XADD per token, awaited one by one", True: "an XADD per token, those of a step in a pipeline"}


class Sizes(Struct, frozen=True, kw_only=True):
    """`few` and `many` streams; `window`: seconds that are measured, `settle` after the first tokens, which come with
    the claims; a reply is `rest` seconds longer than the window, so that all streams run while it is open.
    """

    few: int = 64
    many: int = 256
    window: float = 4.0
    settle: float = 0.4
    rest: float = 1.2
    long_bytes: int = 2_000_000

    @property
    def tokens(self) -> int:
        return round(RATE * (self.window + self.rest))


class Round(Struct, frozen=True, kw_only=True):
    """Milliseconds from engine to client; processors used (1.0: one core); microseconds and bytes a token."""

    p50: float
    p99: float
    longest: float
    rate: float
    writer: float
    redis: float
    writer_us: float
    redis_us: float
    commands_us: float
    tokens_per_entry: float
    bytes_per_token: float


class Streams:
    """One worker for all rounds; the plain writers take turns with it."""

    def __init__(self, bench: Bench, sizes: Sizes, rounds: int) -> None:
        self._bench = bench
        self._sizes = sizes
        self._rounds = rounds
        self._plan = bench.plan(rate=RATE, rows=sizes.many, jobs=sizes.many, tokens=sizes.tokens, limit=LIMIT)
        self._stamps = self._plan.open_stamps()
        self._queue = bench.name()

    def beside_long_prompts(self) -> list[Figure]:
        """`few` streams alone, and while one prompt of 2 MB after the other is tokenised in the same process."""
        few, last = self._sizes.few, self._sizes.many - 1
        prompts = LongPrompts(self._bench, Keys(self._queue), last, self._sizes.long_bytes)
        with self._worker() as worker:
            every = {"alone": self._repeat(lambda: self._ours(worker, few))}
            with busy_neighbour():
                every["beside a process that computes"] = self._repeat(lambda: self._ours(worker, few))
            with prompts:
                every["beside long prompts"] = self._repeat(lambda: self._ours(worker, few))
        size = f"{self._sizes.long_bytes:,} bytes"
        beside, neighbour = (every[name].p99 for name in ("beside long prompts", "beside a process that computes"))
        return [
            *(figure for name, rounds in every.items() for figure in _waits(f"{few} streams {name}", rounds)),
            Figure("99 of 100, beside long prompts / a process", beside / neighbour, "times"),
            Figure(f"a prompt of {size}, from submission to its end, median", prompts.median(), "s"),
        ]

    def latency(self) -> list[Figure]:
        """The mark of `few` streams."""
        few = self._sizes.few
        with self._worker() as worker:
            rounds = self._repeat(lambda: self._ours(worker, few))
        return [
            Figure(f"from engine to client, {few} streams, median", rounds.p50, "ms", limit=2.0),
            Figure(f"from engine to client, {few} streams, 99 of 100", rounds.p99, "ms", limit=10.0),
            Figure(f"from engine to client, {few} streams, longest", rounds.longest, "ms"),
            *_usage(rounds, few),
        ]

    def sustained(self) -> list[Figure]:
        """The mark of `many` streams."""
        many = self._sizes.many
        with self._worker() as worker:
            rounds = self._repeat(lambda: self._ours(worker, many))
        return [
            Figure(f"{many} streams", round(rounds.rate), "tokens/s", limit=0.98 * many * RATE, at_least=True),
            Figure(f"parent process, {many} streams", 100 * rounds.writer, "% core", limit=100.0),
            Figure(f"from engine to client, {many} streams, median", rounds.p50, "ms"),
            Figure(f"from engine to client, {many} streams, 99 of 100", rounds.p99, "ms"),
            *_usage(rounds, many)[1:],
        ]

    def against_plain(self) -> list[Figure]:
        """Our writer and two that know no fence, in turns."""
        few = self._sizes.few
        with self._worker() as worker:
            works: dict[str, Callable[[], Round]] = {"fenced, exactly once": lambda: self._ours(worker, few)}
            works |= {name: lambda each=each: self._plain(few, pipelined=each) for each, name in PLAIN.items()}
            every: dict[str, list[Round]] = {name: [] for name in works}
            for _ in range(self._rounds):
                for name, work in works.items():
                    every[name].append(work())
        found = {name: _median(rounds) for name, rounds in every.items()}
        return [figure for name, rounds in found.items() for figure in _costs(name, rounds)] + _ratios(found)

    def _repeat(self, work: Callable[[], Round]) -> Round:
        return _median([work() for _ in range(self._rounds)])

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        with Worker(self._bench, self._queue, self._plan) as worker:
            worker.wait_ready()
            yield worker

    def _ours(self, worker: Worker, streams: int) -> Round:
        spec = self._spec(streams)
        with clients(spec) as readers:
            return self._measure(spec, readers, worker.pid, "evalsha")

    def _plain(self, streams: int, *, pipelined: bool) -> Round:
        spec = self._spec(streams, submit=False, pipelined=pipelined)
        with clients(spec) as readers, Running("benchmarks.queue_plain", spec) as writer:
            found = self._measure(spec, readers, writer.pid, "xadd")
            writer.end(START_SECONDS)
            return found

    def _spec(self, streams: int, *, submit: bool = True, pipelined: bool = False) -> Spec:
        self._stamps.clear()
        lengths = [self._sizes.tokens] * streams
        return Spec(
            url=self._bench.url, queue=self._queue, run=self._bench.name(), lengths=lengths, plan=self._plan,
            submit=submit, pipelined=pipelined,
        )  # fmt: skip

    def _measure(self, spec: Spec, readers: Running, writer: int, command: str) -> Round:
        """Open the window once all streams run, close it before they end."""
        streams = len(spec.lengths)
        wait_until(lambda: self._stamps.all_read(streams, 0), START_SECONDS, "all streams to begin")
        time.sleep(self._sizes.settle)
        before = self._bench.cost(writer, command)
        time.sleep(self._sizes.window)
        after = self._bench.cost(writer, command)
        summary = readers.summary(START_SECONDS)
        waits = sorted(self._stamps.waits(before.at, after.at, streams))
        if not waits:
            raise RuntimeError("the machine is so busy that all replies had ended before anything was measured")
        entries = summary.tokens / summary.entries
        return _round(waits, before, after, entries, self._bytes(spec) / summary.tokens)

    def _bytes(self, spec: Spec) -> int:
        """Of a round's replies and records, which are deleted then."""
        keys = Keys(spec.queue)
        ids = [job_id(spec.run, index) for index in range(len(spec.lengths))]
        names = [keys.out(name) for name in ids] + [keys.job(name) for name in ids]
        found = self._bench.bytes_of(names)
        self._bench.redis.delete(*names)
        return found


def _round(waits: list[float], before: Cost, after: Cost, entries: float, size: float) -> Round:
    seconds, tokens = after.at - before.at, len(waits)
    return Round(
        p50=1e3 * waits[tokens // 2],
        p99=1e3 * waits[tokens * 99 // 100],
        longest=1e3 * waits[-1],
        rate=tokens / seconds,
        writer=(after.writer - before.writer) / seconds,
        redis=(after.redis - before.redis) / seconds,
        writer_us=1e6 * (after.writer - before.writer) / tokens,
        redis_us=1e6 * (after.redis - before.redis) / tokens,
        commands_us=1e6 * (after.commands - before.commands) / tokens,
        tokens_per_entry=entries,
        bytes_per_token=size,
    )


def _median(rounds: list[Round]) -> Round:
    """Number by number."""
    return Round(**{name: statistics.median(getattr(r, name) for r in rounds) for name in Round.__struct_fields__})


def _usage(rounds: Round, streams: int) -> list[Figure]:
    return [
        Figure(f"parent process, {streams} streams", 100 * rounds.writer, "% core"),
        Figure(f"Redis, {streams} streams", 100 * rounds.redis, "% core"),
        Figure(f"tokens an entry, {streams} streams", rounds.tokens_per_entry, "tokens"),
    ]


def _waits(name: str, rounds: Round) -> list[Figure]:
    """Marked beside long prompts: a token may wait as long as tokens are merged at most, and once more."""
    marked = "long prompts" in name
    return [
        Figure(f"from engine to client, {name}, median", rounds.p50, "ms", limit=5.0 if marked else None),
        Figure(f"from engine to client, {name}, 99 of 100", rounds.p99, "ms", limit=80.0 if marked else None),
        Figure(f"from engine to client, {name}, longest", rounds.longest, "ms"),
    ]


def _costs(name: str, rounds: Round) -> list[Figure]:
    return [
        Figure(f"{name}: the writer's processor time, a token", rounds.writer_us, "µs"),
        Figure(f"{name}: Redis' processor time, a token", rounds.redis_us, "µs"),
        Figure(f"{name}: of that in the writer's commands", rounds.commands_us, "µs"),
        Figure(f"{name}: Redis' memory, a token", rounds.bytes_per_token, "bytes"),
        Figure(f"{name}: from engine to client, median", rounds.p50, "ms"),
        Figure(f"{name}: from engine to client, 99 of 100", rounds.p99, "ms"),
    ]


def _ratios(found: dict[str, Round]) -> list[Figure]:
    """Ours over plain: cheaper is below 1."""
    ours, *plain = found.items()
    return [
        Figure(f"{what}, {ours[0]} / {name}", getattr(ours[1], field) / getattr(rounds, field), "times")
        for name, rounds in plain
        for what, field in (("writer's time", "writer_us"), ("Redis' time", "redis_us"), ("memory", "bytes_per_token"))
    ]
