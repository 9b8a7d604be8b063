"""Peak memory of a process that does nothing but run the engine. Started by benchmarks/engine.py; prints bytes."""

import json
import resource
import subprocess
import sys
from pathlib import Path

from msgspec import Struct

from benchmarks.ours import BLOCK_SIZE, Ours, random_prompts
from engine.modelconfig import load_config


class Memory(Struct, frozen=True):
    """Bytes. `other` is what the peak holds beyond weights and KV pool."""

    peak: int
    weights: int
    kv_pool: int

    @property
    def other(self) -> int:
        return self.peak - self.weights - self.kv_pool


def measure(model: Path, kv_blocks: int, threads: int) -> Memory:
    """Load, compute sixteen long prompts and decode, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", str(model), str(kv_blocks), str(threads)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the memory run failed:\n{done.stderr}")
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return Memory(json.loads(done.stdout)["peak"], weights, kv_blocks * _block_bytes(model))


def _block_bytes(model: Path) -> int:
    config = load_config(model)
    return 2 * config.layers * config.kv_heads * config.head_dim * BLOCK_SIZE * 2  # K and V, two bytes each


def main() -> None:
    model, kv_blocks, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    engine = Ours(model, prefix_cache=True, kv_blocks=kv_blocks, threads=threads)
    length = min(1024, kv_blocks * BLOCK_SIZE // 2)
    engine.run(random_prompts(16, length, load_config(model).vocab_size, seed=1), 8)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"peak": peak * (1 if sys.platform == "darwin" else 1024)}))


if __name__ == "__main__":
    main()
