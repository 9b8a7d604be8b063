"""What choosing tokens costs: each parameter set, beside the products of a decode step, and beside torch's plain way.

    python -m benchmarks.sampling                         # a vocabulary of 151,936, batches of 1, 16 and 128
    python -m benchmarks.sampling --json results.json

The step is the matrix products of Qwen3-0.6B's shape in bfloat16 (constant weights), by stock torch, in the same run:
attention and all else come on top, so a share is never too low. Torch's way is softmax and multinomial; for top-k and
top-p a topk and a sort before them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from benchmarks import environment
from engine.request import Request, SamplingParams
from engine.sampler import Sampler
from engine.sequence import Sequence

VOCAB = 151_936
BATCHES = (1, 16, 128)
LAYERS, HIDDEN = 28, 1024
PRODUCTS = ((HIDDEN, 4096), (2048, HIDDEN), (HIDDEN, 6144), (3072, HIDDEN))  # in, out: qkv, o, gate and up, down
PROMPT = 500  # tokens that a repetition penalty looks at
SECONDS = 0.5  # how long a figure is measured, after three runs
SETS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k, top_p, min_p": {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "temperature": 0.0},
    "bias on 300": {"logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0), "temperature": 0.0},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": [5, 6, 7], "temperature": 0.0},
    "logprobs": {"logprobs": 20, "temperature": 0.0},
    "all of them": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "min_tokens": 10,
        "frequency_penalty": 0.1, "logit_bias": {7: 1.0, 8: -1.0}, "stop_token_ids": [5, 6], "logprobs": 5,
    },
}  # fmt: skip


class Row(Struct, frozen=True, kw_only=True):
    """One parameter set in one batch; `share` of the step's products, `torch_ms` where torch has a way of its own."""

    logits: str
    parameters: str
    batch: int
    ms: float
    share: float
    torch_ms: float | None


def logits_like(kind: str, batch: int) -> Tensor:
    """Peaked as a language model's (the r-th likeliest token falls with r^-1.5), or flat (normal, hardly any order)."""
    generator = torch.Generator().manual_seed(batch)
    if kind == "flat":
        return torch.randn(batch, VOCAB, generator=generator)
    falling = -1.5 * torch.arange(1, VOCAB + 1).log()
    return torch.stack([falling[torch.randperm(VOCAB, generator=generator)] for _ in range(batch)])


def seconds(work: Callable[[Tensor], object], logits: Tensor, least: float) -> float:
    """The quickest run on fresh copies of the logits, tried for `least` seconds: the one disturbed least."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < least:
        fresh = logits.clone()
        start = time.perf_counter()
        work(fresh)
        times.append(time.perf_counter() - start)
    return min(times)


def ours(parameters: dict[str, object], batch: int) -> Callable[[Tensor], object]:
    """A draw for a batch of requests with these parameters."""
    sampler, sequences = Sampler(batch, VOCAB, torch.device("cpu")), list[Sequence]()
    for row in range(batch):
        asked = Request(id=str(row), tokens=list(range(PROMPT)), sampling=SamplingParams(**parameters))  # pyright: ignore[reportArgumentType]
        ends = frozenset(asked.sampling.stop_token_ids)
        sequence = Sequence(asked, limit=4096, end_ids=ends, namespace=(), engine_seed=0)
        sequence.row, sequence.pending = row, 1
        sampler.open(sequence)
        sequences.append(sequence)
    positions = torch.full((batch,), PROMPT)

    def work(logits: Tensor) -> object:
        positions.add_(1)
        return sampler.draw(logits, sequences, positions).logprobs

    return work


def plain(name: str) -> Callable[[Tensor], object] | None:
    """The same in the fewest lines of torch, where there is such a way."""
    return {"greedy": _argmax, "temperature": _multinomial, "top_k": _plain_top_k, "top_p": _plain_top_p}.get(name)


def _argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _multinomial(logits: Tensor) -> Tensor:
    return torch.multinomial((logits / 0.8).softmax(-1), 1)


def _plain_top_k(logits: Tensor) -> Tensor:
    last = logits.topk(50).values[:, -1:]
    return torch.multinomial(logits.masked_fill(logits < last, -torch.inf).softmax(-1), 1)


def _plain_top_p(logits: Tensor) -> Tensor:
    values, order = logits.softmax(-1).sort(-1, descending=True)
    values[values.cumsum(-1) - values >= 0.95] = 0.0
    return order.gather(1, torch.multinomial(values, 1))


class Step:
    """The products of a decode step."""

    def __init__(self, layers: int) -> None:
        shapes = [*PRODUCTS * layers, (HIDDEN, VOCAB)]
        self._weights = [torch.full((wide, deep), 0.01, dtype=torch.bfloat16) for deep, wide in shapes]

    def seconds(self, batch: int, least: float) -> float:
        inputs = {deep: torch.ones(batch, deep, dtype=torch.bfloat16) for deep, _ in PRODUCTS}
        return seconds(lambda _: [F.linear(inputs[w.shape[1]], w) for w in self._weights], torch.zeros(1), least)


@torch.inference_mode()
def measure(batches: list[int], kinds: list[str], *, quick: bool) -> tuple[dict[int, float], list[Row]]:
    """Milliseconds of the step's products by batch, and every parameter set beside them."""
    step, least = Step(1 if quick else LAYERS), 0.0 if quick else SECONDS
    steps = {batch: step.seconds(batch, least) * 1e3 for batch in batches}
    del step
    rows: list[Row] = []
    for kind in kinds:
        for batch in batches:
            logits = logits_like(kind, batch)
            for name, parameters in SETS.items():
                own, other = seconds(ours(parameters, batch), logits, least) * 1e3, plain(name)
                beside = None if other is None else seconds(other, logits, least) * 1e3
                share = own / steps[batch]
                rows.append(Row(logits=kind, parameters=name, batch=batch, ms=own, share=share, torch_ms=beside))
            print(f"{kind} logits, batch {batch}: done", file=sys.stderr)
    return steps, rows


def show(steps: dict[int, float], rows: list[Row]) -> None:
    """A line per parameter set; for each batch the time, its share of the step, and torch's time."""
    print("\nproducts of a step: " + ", ".join(f"{ms:.4g} ms for a batch of {batch}" for batch, ms in steps.items()))
    for kind in dict.fromkeys(row.logits for row in rows):
        heads = [f"{f'batch {batch}, ms':>14} {'of step':>8} {'torch, ms':>10}" for batch in steps]
        print(f"\n{kind + ' logits':<22}" + "".join(heads))
        for name in SETS:
            cells = [_cell(row) for row in rows if (row.logits, row.parameters) == (kind, name)]
            print(f"{name:<22}" + "".join(cells))


def _cell(row: Row) -> str:
    beside = "" if row.torch_ms is None else f"{row.torch_ms:.4g}"
    return f"{row.ms:>14.3g} {row.share:>8.2%} {beside:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description="What choosing tokens costs.")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--logits", choices=("peaked", "flat"), nargs="+", default=["peaked", "flat"])
    parser.add_argument("--threads", type=int, default=environment.cpus())
    parser.add_argument("--quick", action="store_true", help="one layer, three runs; the numbers mean little")
    parser.add_argument("--json", metavar="FILE", help="write every number here (- for standard output)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = environment.describe(options.threads)
    steps, rows = measure(options.batches, options.logits, quick=options.quick)
    report = {
        "environment": where,
        "step_ms": steps,
        "rows": [{f: getattr(r, f) for f in Row.__struct_fields__} for r in rows],
    }
    if options.json == "-":
        print(json.dumps(report, indent=1))
        return
    print("\n".join(f"{name:>14}  {value}" for name, value in where.items()))
    show(steps, rows)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
