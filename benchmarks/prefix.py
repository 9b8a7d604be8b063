"""The prefix cache, on against off in one run: what it costs, what it saves, and how far it is from the best.

    python -m benchmarks.prefix                                          # with a made-up trace
    python -m benchmarks.prefix --trace conversation.jsonl.gz            # with one in the Mooncake format
    python -m benchmarks.prefix --only costs,d --trace trace.jsonl       # neither torch nor a model: seconds
    python -m benchmarks.prefix --json results.json --check              # exit 1 unless every mark is met

Sections: `costs` of the pool's operations, a token; (a) nothing shared; (b) 16 jobs sharing 768 of 800 tokens;
(c) ten-turn chats; (d) arrival order and prefixes of a trace scaled to the model's context. Only ratios within one run
count, and CPU times: let nothing else run meanwhile.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks import environment, poolcosts
from benchmarks.figure import Figure
from benchmarks.prefix_trace import Comparison, Setting
from benchmarks.sections import chosen, conclude, measured
from benchmarks.trace import shared_trace, synthesise
from worker.load.traces import Request

SECTIONS = {
    "costs": "costs of the pool's operations",
    "a": "(a) no shared prefix",
    "b": "(b) jobs with a shared prefix",
    "c": "(c) chats of several turns",
    "d": "(d) a trace",
}
MADE_UP = 3000  # requests, when no trace is given


def on_model(options: argparse.Namespace) -> dict[str, Callable[[], list[Figure]]]:
    """The sections that load a model. Imported only here: the others need no torch."""
    from benchmarks.prefix_engine import Bench, Sizes
    from worker.models import resolve_model

    short = Sizes(strangers=18, stranger=32, new=8, jobs=4, shared=96, suffix=16, shared_new=4, turns=3)
    sizes = short if options.quick else Sizes()
    bench = Bench(resolve_model(options.model), sizes, options.threads, options.rounds)
    return {"a": bench.strangers, "b": bench.sharing, "c": bench.chats}


def trace_of(options: argparse.Namespace) -> list[Request]:
    requests = shared_trace(options.trace) if options.trace else synthesise(MADE_UP)
    return requests[: options.requests]


def on_trace(options: argparse.Namespace) -> list[Figure]:
    pools = tuple(int(size) for size in options.pools.split(","))
    setting = Setting(context=options.context, block_size=options.block_size, rows=options.running, pools=pools)
    return Comparison(trace_of(options), setting).figures()


def measure(options: argparse.Namespace, wanted: list[str]) -> dict[str, list[Figure]]:
    works: dict[str, Callable[[], list[Figure]]] = {
        "costs": lambda: poolcosts.measure(options.block_size, options.rounds + 4),
        "d": lambda: on_trace(options),
    }
    if {"a", "b", "c"} & set(wanted):
        works |= on_model(options)
    return measured(SECTIONS, {section: works[section] for section in wanted})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description="The prefix cache, on and off.")
    parser.add_argument("--only", type=chosen(SECTIONS), default=list(SECTIONS), metavar="costs,a,b,c,d")
    parser.add_argument("--model", default="smollm2", help="as for gllm worker")
    parser.add_argument("--rounds", type=int, default=5, help="of (a), (b) and (c), after one to warm up")
    parser.add_argument("--threads", type=int, default=environment.cpus())
    parser.add_argument("--quick", action="store_true", help="short prompts in (a) to (c); the numbers mean little")
    parser.add_argument("--trace", type=Path, help="Mooncake format, .jsonl or .jsonl.gz; made up when absent")
    parser.add_argument("--requests", type=int, help="only so many of the trace's first requests")
    parser.add_argument("--context", type=int, default=8192, help="tokens that the trace's longest request must fit")
    parser.add_argument("--running", type=int, default=16, help="requests of the trace at a time")
    parser.add_argument("--pools", default="1024,4096,16384,65536,262144", help="pool sizes for the trace, in blocks")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", metavar="FILE", help="write every figure here (- for standard output)")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every mark is met")
    return parser.parse_args()


def main() -> None:
    options = parse()
    where = environment.describe(options.threads)
    results = measure(options, options.only)
    conclude(options, SECTIONS, where, results)


if __name__ == "__main__":
    main()
