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
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import environment, poolcosts
from benchmarks.figure import Figure, as_json
from benchmarks.prefix_trace import Comparison, Setting
from benchmarks.trace import TraceRequest, read_trace, synthesise

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


def trace_of(options: argparse.Namespace) -> list[TraceRequest]:
    requests = read_trace(options.trace) if options.trace else synthesise(MADE_UP)
    return requests[: options.requests]


def on_trace(options: argparse.Namespace) -> list[Figure]:
    pools = tuple(int(size) for size in options.pools.split(","))
    setting = Setting(context=options.context, block_size=options.block_size, rows=options.running, pools=pools)
    return Comparison(trace_of(options), setting).figures()


def measure(options: argparse.Namespace, chosen: list[str]) -> dict[str, list[Figure]]:
    works: dict[str, Callable[[], list[Figure]]] = {
        "costs": lambda: poolcosts.measure(options.block_size, options.rounds + 4),
        "d": lambda: on_trace(options),
    }
    if {"a", "b", "c"} & set(chosen):
        works |= on_model(options)
    results: dict[str, list[Figure]] = {}
    for section in chosen:
        results[section] = works[section]()
        print(f"{SECTIONS[section]}: done", file=sys.stderr)
    return results


def show(where: dict[str, str | int | float], results: dict[str, list[Figure]]) -> None:
    for name, value in where.items():
        print(f"{name:>14}  {value}")
    for section, figures in results.items():
        print(f"\n{SECTIONS[section]}")
        print("\n".join(figure.line() for figure in figures))


def sections(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(SECTIONS):
        raise argparse.ArgumentTypeError(f"some of {', '.join(SECTIONS)} expected, got {text!r}")
    return [name for name in SECTIONS if name in chosen]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description="The prefix cache, on and off.")
    parser.add_argument("--only", type=sections, default=list(SECTIONS), metavar="costs,a,b,c,d")
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
    report = {"environment": where, "results": {name: as_json(figures) for name, figures in results.items()}}
    if options.json == "-":
        print(json.dumps(report, indent=1))
    else:
        show(where, results)
    if options.json and options.json != "-":
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if options.check and not all(f.met for figures in results.values() for f in figures) else 0)


if __name__ == "__main__":
    main()
