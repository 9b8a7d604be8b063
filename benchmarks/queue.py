"""The queue and the worker around an engine's stand-in: what a token waits on its way, and what the promises cost.

    python -m benchmarks.queue                            # three rounds, medians; on a machine with nothing else to do
    python -m benchmarks.queue --only latency --rounds 5
    python -m benchmarks.queue --json results.json --check     # exit 1 unless every mark is met

The server, the workers' asyncio processes, tokenizer and scripts are the real ones, each worker with a process in place
of its engine that emits tokens at a set rate, and clients in a process of their own. Sections: `latency` of 64 streams;
256 of them `sustained`; 64 beside `long` prompts; the `start` of a job on an idle worker; `recovery` from a kill -9;
`balance` among 1 to 8 workers; fenced and exactly once against a `plain` XADD per token. Needs Linux (/proc).
"""

import sys
from pathlib import Path

if sys.path[0] == str(Path(__file__).parent):  # started by path: else `import queue` would find this very file
    sys.path[0] = str(Path(__file__).parent.parent)

import argparse
import tempfile
from collections.abc import Callable
from importlib.metadata import version

from benchmarks import environment, queue_jobs, queue_streams
from benchmarks.figure import Figure
from benchmarks.queue_processes import Bench, bench
from benchmarks.sections import chosen, conclude, measured

SECTIONS = {
    "latency": "latency: a token's way from the engine to its client",
    "sustained": "sustained: many streams",
    "long": "long: prompts of 2 MB are tokenised beside 64 streams",
    "start": "start: a job comes to an idle worker",
    "recovery": "recovery: the worker of a lone job is killed",
    "balance": "balance: workers share jobs",
    "plain": "plain: fenced and exactly once, against an XADD per token",
}
BUSY_LOAD = 0.5  # processes that wait for a processor, over the last minute
QUICK_STREAMS = queue_streams.Sizes(few=4, many=8, window=0.3, settle=0.1, long_bytes=20_000)
QUICK_JOBS = queue_jobs.Sizes(starts=4, leases=(0.5,), jobs=40, crowds=(1, 2))


def measure(found: Bench, options: argparse.Namespace) -> dict[str, list[Figure]]:
    streams = queue_streams.Streams(found, QUICK_STREAMS if options.quick else queue_streams.Sizes(), options.rounds)
    jobs = QUICK_JOBS if options.quick else queue_jobs.Sizes()
    works: dict[str, Callable[[], list[Figure]]] = {
        "latency": streams.latency,
        "sustained": streams.sustained,
        "long": streams.beside_long_prompts,
        "start": lambda: queue_jobs.start(found, jobs),
        "recovery": lambda: queue_jobs.recovery(found, jobs),
        "balance": lambda: queue_jobs.balance(found, jobs),
        "plain": streams.against_plain,
    }
    return measured(SECTIONS, {section: works[section] for section in options.only})


def surroundings(found: Bench) -> dict[str, str | int | float]:
    kept = ("commit", "cpu", "cpus", "load_before", "python", "system")
    described = environment.describe(1)
    info = found.redis.info("server")
    server = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    libraries = {name: version(name) for name in ("redis", "msgspec", "uvloop")}
    return {name: described[name] for name in kept} | {"server": server} | libraries


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue", description="What a token waits, and costs.")
    parser.add_argument("--only", type=chosen(SECTIONS), default=list(SECTIONS), metavar=",".join(SECTIONS))
    parser.add_argument("--model", default="smollm2", help="whose tokenizer, as for gllm worker")
    parser.add_argument("--rounds", type=int, default=3, help="of latency, sustained, long and plain")
    parser.add_argument("--server", help="a redis-server or valkey-server; default: one that is installed")
    parser.add_argument("--quick", action="store_true", help="does it run at all; the numbers mean little")
    parser.add_argument("--json", metavar="FILE", help="write every figure here (- for standard output)")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every mark is met")
    return parser.parse_args()


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch, bench(Path(scratch), options.server, options.model) as found:
        where = surroundings(found)
        if float(where["load_before"]) > BUSY_LOAD:
            print(f"something else is running (load {where['load_before']}): worth little", file=sys.stderr)
        results = measure(found, options)
    conclude(options, SECTIONS, where, results)


if __name__ == "__main__":
    main()
