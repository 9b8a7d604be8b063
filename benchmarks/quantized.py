"""What weights in few bits cost: the perplexity of one passage, and the memory, beside bfloat16 and float32.

python -m benchmarks.quantized                 # SmolLM2
python -m benchmarks.quantized --model FILE
"""

import argparse
import math
import sys
from pathlib import Path

from msgspec import Struct

from benchmarks.environment import describe
from engine import Engine, EngineConfig, Request, SamplingParams
from worker.models import resolve_model
from worker.tokenizer import load_tokenizer

TEXT = Path(__file__).parent / "texts" / "austen.txt"
WAYS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"))


class Cost(Struct, frozen=True):
    """Of one way to keep the weights. `bytes`: of parameters, as the engine tells."""

    dtype: str
    quantize: str
    perplexity: float
    bytes: int


def measure(model: str, tokens: int) -> list[Cost]:
    """Score the first `tokens` tokens of the passage in every way."""
    path = resolve_model(model)
    ids = load_tokenizer(path).encode(TEXT.read_text(encoding="utf-8"))[:tokens]
    return [_score(str(path), ids, dtype, quantize) for dtype, quantize in WAYS]


def _score(path: str, ids: list[int], dtype: str, quantize: str) -> Cost:
    engine = Engine(EngineConfig(model=path, device="cpu", dtype=dtype, quantize=quantize, kv_blocks=256))  # type: ignore[arg-type]
    engine.add(Request(id="passage", tokens=ids, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0)))
    scores = list[float]()
    while engine.busy:
        for delta in engine.step():
            scores += [row[1] for row in delta.prompt_logprobs or [] if row is not None]
    assert len(scores) == len(ids) - 1, f"{len(scores)} scores of {len(ids)} tokens"
    return Cost(dtype, quantize, math.exp(-sum(scores) / len(scores)), engine.info.weight_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    print("\n".join(f"{name:>12}  {value}" for name, value in describe(0).items() if name != "threads"))
    print(f"{'dtype':>9} {'quantize':>9} {'perplexity':>11} {'MB':>6}")
    for cost in measure(options.model, options.tokens):
        print(f"{cost.dtype:>9} {cost.quantize:>9} {cost.perplexity:11.3f} {cost.bytes / 1e6:6.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
