"""The engine against plain `transformers.generate`: same checkpoint, same process, same threads, one run.

    python -m benchmarks.engine                      # the demo model, five alternating rounds, medians
    python -m benchmarks.engine --json results.json  # and every number of every round
    python -m benchmarks.engine --rounds 1 --quick   # does it run at all

Only ratios within one run count: absolute numbers depend on the machine and its mood. Let nothing else run meanwhile.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if sys.path[0] == str(Path(__file__).parent):  # started by path: else `import engine` would find this very file
    sys.path[0] = str(Path(__file__).parent.parent)

import torch
from msgspec import Struct

from benchmarks import environment, memory
from benchmarks.checkpoint import huggingface_directory
from benchmarks.ours import BLOCK_SIZE, Ours, Prompt, Run, random_prompts
from benchmarks.peer import Transformers
from engine.modelconfig import load_config
from worker.models import resolve_model

MEGABYTE = 1_000_000
BUSY_LOAD = 0.5  # processes that wait for a processor, over the last minute


class Sizes(Struct, frozen=True, kw_only=True):
    """Tokens. The defaults are those of the marks."""

    prompt: int = 32
    new: int = 64
    prefill: int = 1024
    shared: int = 768
    suffix: int = 32
    shared_new: int = 16
    batches: tuple[int, ...] = (1, 8, 16)

    @property
    def kv_blocks(self) -> int:
        longest = max(self.prompt + self.new, self.shared + self.suffix + self.shared_new)
        return -(-longest // BLOCK_SIZE) * max(self.batches) + -(-self.prefill // BLOCK_SIZE) + 16


class Mark(Struct, frozen=True):
    """A ratio (or megabytes) that must reach `wanted`, or stay below it."""

    name: str
    got: float
    wanted: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.got <= self.wanted if self.at_most else self.got >= self.wanted


class Bench:
    """Both sides, loaded, and what is measured on them. Every measurement returns one number."""

    def __init__(self, model: Path, sizes: Sizes, threads: int) -> None:
        torch.set_num_threads(threads)
        self.sizes = sizes
        self.vocab_size = load_config(model).vocab_size
        self.plain = Ours(model, prefix_cache=False, kv_blocks=sizes.kv_blocks, threads=threads)
        self.caching = Ours(model, prefix_cache=True, kv_blocks=sizes.kv_blocks, threads=threads)
        self.peer = Transformers(model)
        self._seed = 0

    def measurements(self) -> dict[str, Callable[[], float]]:
        """In the order of a round. Both sides of a ratio stand side by side, so that they share the machine's mood."""
        found: dict[str, Callable[[], float]] = {}
        for batch in self.sizes.batches:
            found[f"decode {batch}, gllm (tokens/s)"] = lambda batch=batch: self._decode(self.plain.run, batch)
            if batch > 1:
                static = f"decode {batch}, transformers static batch (tokens/s)"
                found[static] = lambda batch=batch: self._decode(self.peer.run, batch)
            else:
                found["decode, transformers one by one (tokens/s)"] = lambda: self._decode(self.peer.run_one_by_one, 2)
        found["prefill, gllm (tokens/s)"] = lambda: self._prefill(self.plain.run)
        found["prefill, transformers (tokens/s)"] = lambda: self._prefill(self.peer.run)
        for name, subject in (("off", self.plain), ("on", self.caching)):
            found[f"second job starts, cache {name} (s)"] = lambda subject=subject: self._second_start(subject)
            found[f"shared prefix batch, cache {name} (s)"] = lambda subject=subject: self._shared_batch(subject)
        return found

    def _prompts(self, count: int, length: int) -> list[Prompt]:
        self._seed += 1
        return random_prompts(count, length, self.vocab_size, self._seed)

    def _decode(self, run: Callable[[list[Prompt], int], Run], batch: int) -> float:
        return run(self._prompts(batch, self.sizes.prompt), self.sizes.new).decode_rate

    def _prefill(self, run: Callable[[list[Prompt], int], Run]) -> float:
        return self.sizes.prefill / run(self._prompts(1, self.sizes.prefill), 1).first_tokens

    def _second_start(self, subject: Ours) -> float:
        """Seconds until the first token of a job whose prefix an earlier job had."""
        first, second = self._sharing(2)
        subject.run([first], 1)
        return subject.run([second], 1).first_tokens

    def _shared_batch(self, subject: Ours) -> float:
        """Seconds for a batch whose prompts share a prefix that one job before it had, too."""
        warm, *batch = self._sharing(max(self.sizes.batches) + 1)
        subject.run([warm], 1)
        return subject.run(batch, self.sizes.shared_new).total

    def _sharing(self, count: int) -> list[Prompt]:
        (prefix,) = self._prompts(1, self.sizes.shared)
        return [prefix + suffix for suffix in self._prompts(count, self.sizes.suffix)]


def run_rounds(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Every number of every round, after a warm-up; odd rounds go backwards, so that neither side is always first."""
    measurements = bench.measurements()
    results: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(-1, rounds):
        order = list(measurements.items())
        for name, measure in reversed(order) if number % 2 else order:
            value = measure()
            if number >= 0:
                results[name].append(value)
        print(f"round {number + 1} of {rounds}" if number >= 0 else "warm-up done", file=sys.stderr)
    return results


def judge(medians: dict[str, float], used: memory.Memory, batches: tuple[int, ...]) -> list[Mark]:
    """The marks of the issue, from the medians."""
    alone = medians["decode, transformers one by one (tokens/s)"]
    wanted = {1: 1.3, 16: 4.0}
    marks = [
        Mark(f"decode at batch {batch}, times transformers one by one", medians[name] / alone, wanted.get(batch, 0.0))
        for batch in batches
        if (name := f"decode {batch}, gllm (tokens/s)") in medians
    ]
    prefill = medians["prefill, gllm (tokens/s)"] / medians["prefill, transformers (tokens/s)"]
    sooner = medians["second job starts, cache off (s)"] / medians["second job starts, cache on (s)"]
    faster = medians["shared prefix batch, cache off (s)"] / medians["shared prefix batch, cache on (s)"]
    return [
        *marks,
        Mark("prefill, times transformers", prefill, 0.0),
        Mark("second job with a shared prefix starts, times sooner with the cache", sooner, 5.0),
        Mark("batch with a shared prefix, times faster with the cache", faster, 0.0),
        Mark("memory beyond weights and KV pool (MB)", used.other / MEGABYTE, 700.0, at_most=True),
    ]


def show(where: dict[str, str | int | float], results: dict[str, list[float]], marks: list[Mark]) -> None:
    for name, value in where.items():
        print(f"{name:>14}  {value}")
    print(f"\n{'median':>10} {'least':>10} {'most':>10}")
    for name, values in results.items():
        print(f"{statistics.median(values):10.3f} {min(values):10.3f} {max(values):10.3f}  {name}")
    print()
    for mark in marks:
        limit = "no mark" if not mark.wanted else f"{'at most' if mark.at_most else 'at least'} {mark.wanted:g}"
        verdict = "" if not mark.wanted else "  met" if mark.met else "  NOT MET"
        print(f"{mark.got:10.2f}  {mark.name} ({limit}){verdict}")


def as_json(where: dict[str, str | int | float], results: dict[str, list[float]], marks: list[Mark]) -> str:
    shown = [{"name": m.name, "got": m.got, "wanted": m.wanted or None, "met": m.met} for m in marks]
    return json.dumps({"environment": where, "results": results, "marks": shown}, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description="The engine against transformers.generate."
    )
    parser.add_argument("--model", default="smollm2", help="as for gllm worker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=environment.cpus())
    parser.add_argument("--quick", action="store_true", help="short prompts and replies; the numbers mean little")
    parser.add_argument("--json", metavar="FILE", help="write every number here (- for standard output)")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every mark is met")
    options = parser.parse_args()
    sizes = Sizes(new=8, prefill=128, shared=96, shared_new=4, batches=(1, 4)) if options.quick else Sizes()
    where = environment.describe(options.threads)
    if float(where["load_before"]) > BUSY_LOAD:
        print(
            f"something else is running (load {where['load_before']}): the numbers will be worth little",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory() as scratch:
        model = huggingface_directory(resolve_model(options.model), Path(scratch))
        used = memory.measure(model, sizes.kv_blocks, options.threads)
        results = run_rounds(Bench(model, sizes, options.threads), options.rounds)
    marks = judge({name: statistics.median(values) for name, values in results.items()}, used, sizes.batches)
    if options.json == "-":
        print(as_json(where, results, marks))
    else:
        show(where, results, marks)
    if options.json and options.json != "-":
        Path(options.json).write_text(as_json(where, results, marks) + "\n")
    sys.exit(1 if options.check and not all(mark.met for mark in marks if mark.wanted) else 0)


if __name__ == "__main__":
    main()
