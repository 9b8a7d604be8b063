"""The engine on a CPU against every engine that a user would pick instead, all in one run.

    make peers                                            # each peer into a virtual environment of its own, once
    python -m benchmarks.cpu_peers                        # Qwen3-0.6B's shape, random weights, bfloat16
    python -m benchmarks.cpu_peers --model smollm2        # real weights
    python -m benchmarks.cpu_peers --only gllm,llama.cpp --rounds 1

One engine after the other, each in a process of its own, round by round; odd rounds go backwards. A peer that is not
installed is named and left out. Let nothing else run meanwhile: only ratios within one run count.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from benchmarks import environment
from benchmarks.checkpoint import huggingface_directory
from benchmarks.figure import Figure
from benchmarks.peers.checkpoints import random_qwen3
from benchmarks.peers.engines import NAMES, engines
from benchmarks.peers.process import Peer, PeerError, PeerProcess
from benchmarks.sections import conclude
from worker.models import resolve_model

VOCABULARY = 8000  # ids of prompts: any model here has as many
SHARING = 16  # jobs that share a prefix
POINTS = {
    "decode 1": "decode, one job (tokens/s)",
    "jobs 8": "8 jobs, 128 in, 64 out (tokens/s)",
    "jobs 16": "16 jobs, 128 in, 64 out (tokens/s)",
    "prefill": "prefill of 1,024 (tokens/s)",
    "shared": "16 jobs sharing 768 of 800, 16 out, after one like them (s)",
    "start": "start of the process to its first token (s)",
    "memory": "most memory resident (MB)",
}
Numbers = dict[str, float]


class Sizes(Struct, frozen=True, kw_only=True):
    """Tokens. The defaults are those of the marks."""

    prompt: int = 128
    new: int = 64
    prefill: int = 1024
    shared: int = 768
    suffix: int = 32
    shared_new: int = 16


QUICK = Sizes(prompt=8, new=4, prefill=16, shared=32, suffix=4, shared_new=2)


class Prompts:
    """Random ids, other ones at each call: nothing is found in a cache but what is meant to be."""

    def __init__(self, vocabulary: int) -> None:
        self._random, self._vocabulary = random.Random(0), vocabulary

    def __call__(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(300, self._vocabulary) for _ in range(length)] for _ in range(count)]


class Measuring:
    """One engine, and the points that are measured on it. Every one returns one number."""

    def __init__(self, peer: PeerProcess, prompts: Prompts, sizes: Sizes) -> None:
        self._peer, self._prompts, self._sizes = peer, prompts, sizes

    def points(self, repeats: int) -> Numbers:
        """Medians of `repeats`, after a warm-up of each."""

        def median(run: Callable[[], float]) -> float:
            run()
            return statistics.median(run() for _ in range(repeats))

        return {
            "decode 1": median(self._decode),
            "jobs 8": median(lambda: self._jobs(8)),
            "jobs 16": median(lambda: self._jobs(16)),
            "prefill": median(self._prefill),
            "shared": median(self._shared),
            "start": self._peer.start_seconds,
            "memory": self._peer.peak_bytes / 1e6,
        }

    def _decode(self) -> float:
        run = self._peer.run(self._prompts(1, self._sizes.prompt), self._sizes.new)
        return (self._sizes.new - 1) / (run.total - run.first[0])

    def _jobs(self, count: int) -> float:
        run = self._peer.run(self._prompts(count, self._sizes.prompt), self._sizes.new)
        return count * self._sizes.new / run.total

    def _prefill(self) -> float:
        return self._sizes.prefill / self._peer.run(self._prompts(1, self._sizes.prefill), 1).total

    def _shared(self) -> float:
        (prefix,) = self._prompts(1, self._sizes.shared)
        warm, *batch = [prefix + suffix for suffix in self._prompts(SHARING + 1, self._sizes.suffix)]
        self._peer.run([warm], 1)
        return self._peer.run(batch, self._sizes.shared_new).total


def run_rounds(peers: list[Peer], sizes: Sizes, rounds: int, repeats: int) -> tuple[dict[str, str], dict[str, Numbers]]:
    """Versions, and the median of each point over the rounds, by engine; engines that fail are named and left out."""
    versions: dict[str, str] = {}
    found: dict[str, list[Numbers]] = {peer.name: [] for peer in peers}
    for number in range(rounds):
        for peer in reversed(peers) if number % 2 else peers:
            try:
                with PeerProcess(peer) as process:
                    versions[peer.name] = process.version
                    found[peer.name].append(Measuring(process, Prompts(VOCABULARY), sizes).points(repeats))
            except PeerError as error:
                print(f"{peer.name} failed: {error}", file=sys.stderr)
            print(f"round {number + 1} of {rounds}: {peer.name} done", file=sys.stderr)
    medians = {
        name: {point: statistics.median(numbers[point] for numbers in rows) for point in POINTS}
        for name, rows in found.items()
        if rows
    }
    return versions, medians


def marks(medians: dict[str, Numbers]) -> list[Figure]:
    """The ratios of the issue, for the engines that ran."""

    def ratio(name: str, ours: str, theirs: list[str], point: str, least: float) -> list[Figure]:
        rivals = [medians[peer][point] for peer in theirs if peer in medians]
        if ours not in medians or not rivals:
            return []
        mine = medians[ours][point]
        value = min(rivals) / mine if point == "shared" else mine / max(rivals)
        return [Figure(name, value, "times", least, at_least=True)]

    bf16 = ["vllm", "openvino", "llama.cpp", "transformers"]
    shared = "16 jobs that share a prefix"
    return [
        *ratio("decode at batch 1, the best bf16 peer", "gllm", bf16, "decode 1", 1.3),
        *ratio("8 jobs, the best bf16 peer", "gllm", bf16, "jobs 8", 1.5),
        *ratio("16 jobs, the best bf16 peer", "gllm", bf16, "jobs 16", 1.5),
        *ratio("prefill of 1,024, the best bf16 peer", "gllm", bf16, "prefill", 1.2),
        *ratio(f"{shared}, the best bf16 peer", "gllm", bf16, "shared", 1.5),
        *ratio(f"{shared}, our own without the cache", "gllm", ["gllm no cache"], "shared", 4),
        *ratio("int8, one job, llama.cpp Q8_0", "gllm int8", ["llama.cpp q8_0"], "decode 1", 1.3),
        *ratio("int8, 16 jobs, llama.cpp Q8_0", "gllm int8", ["llama.cpp q8_0"], "jobs 16", 1.3),
        *ratio("int4, one job, llama.cpp Q4_0", "gllm int4", ["llama.cpp q4_0"], "decode 1", 1.2),
        *ratio("int4, 16 jobs, llama.cpp Q4_0", "gllm int4", ["llama.cpp q4_0"], "jobs 16", 1.2),
    ]


def table(medians: dict[str, Numbers], versions: dict[str, str]) -> str:
    """Engines down, points across, in Markdown."""
    head = ["engine", "version", *POINTS]
    rows = [
        [name, versions[name], *(f"{numbers[point]:,.4g}" for point in POINTS)] for name, numbers in medians.items()
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_peers", description="The engine against its peers.")
    parser.add_argument("--model", default="qwen3-0.6b", help="qwen3-0.6b (random weights), or as for gllm worker")
    parser.add_argument("--only", default=",".join(NAMES), help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="of each point in a round, after one to warm up")
    parser.add_argument("--quick", action="store_true", help="short prompts and replies; the numbers mean little")
    parser.add_argument("--threads", type=int, default=environment.cpus())
    parser.add_argument("--work", metavar="DIR", help="keep the checkpoints here for another run")
    parser.add_argument("--json", metavar="FILE", help="write every figure here (- for standard output)")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every mark is met")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    sizes = QUICK if options.quick else Sizes()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(options.work or scratch)
        work.mkdir(parents=True, exist_ok=True)
        model = _checkpoint(options.model, work)
        peers = engines(model, work, options.threads, options.only.split(","))
        versions, medians = run_rounds(peers, sizes, options.rounds, options.repeats)
    print(table(medians, versions))
    print("\n".join(f"{point}: {meaning}" for point, meaning in POINTS.items()))
    points = {
        name: [Figure(f"{name}: {POINTS[point]}", value, "") for point, value in numbers.items()]
        for name, numbers in medians.items()
    }
    titles = {"marks": "Marks", **{name: name for name in points}}
    conclude(options, titles, environment.describe(options.threads), {"marks": marks(medians), **points})


def _checkpoint(name: str, work: Path) -> Path:
    """A Hugging Face directory in bfloat16."""
    directory = work / f"hf-{name.replace('/', '-')}"
    if (directory / "config.json").exists():
        return directory
    return random_qwen3(directory) if name == "qwen3-0.6b" else huggingface_directory(resolve_model(name), directory)


if __name__ == "__main__":
    main()
