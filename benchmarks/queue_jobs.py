"""Jobs one by one and in a crowd: how soon one starts, how soon one goes on after a kill, and who gets how many."""

import statistics
import time
from collections import Counter
from contextlib import ExitStack
from typing import cast

from msgspec import Struct

from benchmarks.figure import Figure
from benchmarks.queue_clients import Spec, body_of
from benchmarks.queue_engine import job_id
from benchmarks.queue_processes import Bench, Worker, clients, wait_until
from benchmarks.queue_stamps import Stamps
from gllm.keys import Keys

RATE = 50  # tokens a second of each request
PAUSE = 0.03  # seconds between two jobs: the worker is idle when the next one comes
ROWS = 16  # requests at a time of each worker that shares jobs with others
FIRST_TOKENS, TOKENS = 20, 80  # of the reply whose worker is killed: before that, and in all


class Sizes(Struct, frozen=True, kw_only=True):
    """`leases`: of the workers that are killed, in seconds, one kill each; `crowds`: numbers of workers."""

    starts: int = 80
    leases: tuple[float, ...] = (2.0, 2.0, 2.0, 15.0)
    jobs: int = 1000
    crowds: tuple[int, ...] = (1, 2, 4, 8)


def start(bench: Bench, sizes: Sizes) -> list[Figure]:
    """From submission to the `start` event, on an idle worker, job after job."""
    plan = bench.plan(rate=RATE, rows=8, jobs=sizes.starts, tokens=2)
    queue = bench.name()
    spec = Spec(
        url=bench.url, queue=queue, run=bench.name(), lengths=[2] * sizes.starts, plan=plan, together=False,
        pause=PAUSE,
    )  # fmt: skip
    with Worker(bench, queue, plan) as worker:
        worker.wait_ready()
        with clients(spec) as readers:
            readers.summary(60)
    return _starts(plan.open_stamps())


def _starts(stamps: Stamps) -> list[Figure]:
    rows = [
        [1e3 * stamps.view[at(job)] for at in (stamps.submitted, stamps.claimed, stamps.added, stamps.started)]
        for job in range(stamps.jobs)
    ]
    parts = {"from submission to claim": (0, 1), "from claim to engine": (1, 2), "from engine to client": (2, 3)}
    figures = [Figure(name, statistics.median(row[b] - row[a] for row in rows), "ms") for name, (a, b) in parts.items()]
    whole = sorted(row[3] - row[1] for row in rows)
    return [
        *figures,
        Figure("from claim to start event, median", statistics.median(whole), "ms", limit=5.0),
        Figure("from claim to start event, 99 of 100", whole[len(whole) * 99 // 100], "ms"),
    ]


def recovery(bench: Bench, sizes: Sizes) -> list[Figure]:
    """A lone job goes on elsewhere after a kill -9 of its worker's process; another worker stands by."""
    waits: dict[float, list[float]] = {}
    for lease in sizes.leases:
        waits.setdefault(lease, []).append(_recover(bench, lease))
    return [
        Figure(
            f"kill -9 to the next token, lease of {lease:g} s, longest of {len(found)}", max(found), "s", lease + 2.0
        )
        for lease, found in waits.items()
    ]


def _recover(bench: Bench, lease: float) -> float:
    """Seconds from the kill to the first token by the other worker that a client has."""
    plan, queue, run = bench.plan(rate=RATE, rows=4, jobs=1, tokens=TOKENS), bench.name(), bench.name()
    stamps = plan.open_stamps()
    spec = Spec(url=bench.url, queue=queue, run=run, lengths=[TOKENS], plan=plan)
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(bench, queue, plan, lease=lease)) for _ in range(2)]
        for worker in workers:
            worker.wait_ready()
        readers = stack.enter_context(clients(spec))
        wait_until(lambda: stamps.all_read(1, FIRST_TOKENS), 20, "the first tokens")
        holder = _worker_of(bench, Keys(queue).job(job_id(run, 0)))
        killed = time.monotonic()
        next(worker for worker in workers if worker.pid == holder).kill()
        wait_until(lambda: _after(stamps, killed) > 0, lease + 20, "another worker to go on")
        readers.summary(lease + 20)  # raises where a token is missing or comes twice
        return _after(stamps, killed) - killed


def _worker_of(bench: Bench, key: str) -> int:
    name = cast(bytes, bench.redis.hget(key, "worker"))
    return int(name.decode().rsplit("-", 2)[1])


def _after(stamps: Stamps, moment: float) -> float:
    """When the first token was read that left an engine after a moment; 0.0 before."""
    for token in range(stamps.tokens):
        left, read = stamps.view[stamps.left(0, token)], stamps.view[stamps.read(0, token)]
        if left > moment and read > moment:
            return read
    return 0.0


def balance(bench: Bench, sizes: Sizes) -> list[Figure]:
    """Workers, each a process with an engine's stand-in of its own, share jobs that are all there from the start."""
    figures: list[Figure] = []
    for count in sizes.crowds:
        seconds, shares = _share(bench, count, sizes.jobs)
        uneven = 100 * (max(shares) / (sizes.jobs / count) - 1)
        name, limit = ("1 worker", None) if count == 1 else (f"{count} workers", 10.0)
        figures.append(Figure(f"{name}, {sizes.jobs:,} jobs: most / mean - 1", uneven, "%", limit=limit))
        figures.append(Figure(f"{name}, {sizes.jobs:,} jobs: time", seconds, "s"))
    return figures


def _share(bench: Bench, count: int, jobs: int) -> tuple[float, list[int]]:
    """Seconds until the last job has ended, and how many each worker had."""
    plan, queue, run = bench.plan(rate=RATE, rows=ROWS, jobs=jobs, tokens=16), bench.name(), bench.name()
    keys = Keys(queue)
    plan.open_stamps()  # so that it is made once, and not by several workers at a time
    with ExitStack() as stack:
        for worker in [stack.enter_context(Worker(bench, queue, plan)) for _ in range(count)]:
            worker.wait_ready()
        began = time.monotonic()
        _submit(bench, keys, run, jobs)
        wait_until(lambda: not bench.redis.xlen(keys.jobs("normal", 0)), 60, "the last job to end")
        seconds = time.monotonic() - began
    shares = _shares(bench, keys, run, jobs)
    return seconds, list(shares.values()) + [0] * (count - len(shares))


def _submit(bench: Bench, keys: Keys, run: str, jobs: int) -> None:
    pipeline = bench.redis.pipeline(transaction=False)
    for index in range(jobs):
        body = body_of(6 + 7 * index % 9)  # tokens: 6 to 14, in no order
        pipeline.xadd(keys.jobs("normal", 0), {"id": job_id(run, index), "body": body})
    pipeline.execute()


def _shares(bench: Bench, keys: Keys, run: str, jobs: int) -> Counter[bytes]:
    pipeline = bench.redis.pipeline(transaction=False)
    for index in range(jobs):
        pipeline.hmget(keys.job(job_id(run, index)), "state", "worker")
    found = pipeline.execute()
    if any(state != b"ended" for state, _ in found):
        raise RuntimeError("a job has not ended")
    return Counter(worker for _, worker in found)
