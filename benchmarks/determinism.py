"""What `deterministic` costs on a CPU: the engine with it on and off, in one run, and its products beside fixed tiles.

    python -m benchmarks.determinism                      # the demo model, five alternating rounds, medians
    python -m benchmarks.determinism --json results.json

Only ratios within one run count. Let nothing else run meanwhile.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import environment
from benchmarks.figure import Figure, as_json
from benchmarks.ours import BLOCK_SIZE, Ours, random_prompts
from engine.weights import open_checkpoint
from kernels import select
from kernels.rows import TILE
from worker.models import resolve_model

DECODE = (1, 8, 16)  # sequences in a batch
PREFILL = (32, 128, 1024)  # tokens of one prompt
PROMPT, NEW = 32, 48  # tokens of a decoding sequence
ROWS = (1, 5, 16, 100, 512)  # of a product


class Engines:
    """The same engine with `deterministic` on and off."""

    def __init__(self, model: Path, threads: int) -> None:
        blocks = max(DECODE) * -(-(PROMPT + NEW) // BLOCK_SIZE) + max(PREFILL) // BLOCK_SIZE + 16
        self._sides = [
            Ours(model, prefix_cache=False, kv_blocks=blocks, threads=threads, deterministic=on) for on in (True, False)
        ]
        self._seed = 0

    def figures(self, rounds: int) -> list[Figure]:
        works: dict[str, Callable[[Ours], float]] = {}
        for batch in DECODE:
            works[f"decode, batch of {batch}"] = lambda side, batch=batch: self._decode(side, batch)
        for length in PREFILL:
            works[f"prefill of {length}"] = lambda side, length=length: self._prefill(side, length)
        return [figure for name, work in works.items() for figure in self._compare(name, work, rounds)]

    def _compare(self, name: str, work: Callable[[Ours], float], rounds: int) -> list[Figure]:
        rates: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            self._seed += 1
            for index in (0, 1) if number % 2 else (1, 0):
                rates[index].append(work(self._sides[index]))
        on, off = (statistics.median(values[1:]) for values in rates)
        return [
            Figure(f"{name}, deterministic", on, "tokens/s"),
            Figure(f"{name}, not", off, "tokens/s"),
            Figure(f"{name}, time with / without", off / on, "times"),
        ]

    def _prompts(self, side: Ours, count: int, length: int) -> list[list[int]]:
        return random_prompts(count, length, side.engine.info.vocab_size, self._seed)

    def _decode(self, side: Ours, batch: int) -> float:
        return side.run(self._prompts(side, batch, PROMPT), NEW).decode_rate

    def _prefill(self, side: Ours, length: int) -> float:
        return length / side.run(self._prompts(side, 1, length), 1).first_tokens


def layer_weights(model: Path) -> list[Tensor]:
    """The matrices of the first layer, in bfloat16."""
    with open_checkpoint(str(model)) as (_, source, _):
        names = [name for name in source.names() if ".layers.0." in name and "proj" in name]
        return [source.read(name).to(torch.bfloat16) for name in names if name.endswith("weight")]


@torch.inference_mode()
def products(model: Path, rounds: int) -> list[Figure]:
    """One layer's products: proven row counts, and fixed tiles of TILE rows, against the stock ones."""
    weights = layer_weights(model)
    ours, stock = ([select(deterministic=on).prepare_linear(w) for w in weights] for on in (True, False))
    figures: list[Figure] = []
    for rows in ROWS:
        inputs = [torch.randn(rows, weight.shape[1]).to(torch.bfloat16) for weight in weights]
        times: list[list[float]] = [[], [], []]
        for _ in range(10 * rounds):
            for at, work in enumerate((stock, ours, [_tiled(product) for product in stock])):
                times[at].append(_seconds(work, inputs))
        base, proven, tiled = map(statistics.median, times)
        figures.append(Figure(f"products of {rows} rows, proven row counts / stock", proven / base, "times"))
        figures.append(Figure(f"products of {rows} rows, tiles of {TILE} rows / stock", tiled / base, "times"))
    return figures


def _tiled(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def tiled(x: Tensor) -> Tensor:
        missing = -len(x) % TILE
        padded = torch.cat((x, x.new_zeros(missing, x.shape[1]))) if missing else x
        return torch.cat([product(tile) for tile in padded.split(TILE)])[: len(x)]

    return tiled


def _seconds(work: list[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> float:
    start = time.perf_counter()
    for product, x in zip(work, inputs, strict=True):
        product(x)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.determinism", description="What determinism costs.")
    parser.add_argument("--model", default="smollm2", help="as for gllm worker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=environment.cpus())
    parser.add_argument("--json", metavar="FILE", help="write every figure here (- for standard output)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where, model = environment.describe(options.threads), resolve_model(options.model)
    figures = [*products(model, options.rounds), *Engines(model, options.threads).figures(options.rounds)]
    report = json.dumps({"environment": where, "results": as_json(figures)}, indent=1)
    if options.json == "-":
        print(report)
        return
    print("\n".join(f"{name:>14}  {value}" for name, value in where.items()) + "\n")
    print("\n".join(figure.line() for figure in figures))
    if options.json:
        Path(options.json).write_text(report + "\n")


if __name__ == "__main__":
    main()
