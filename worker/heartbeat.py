"""What a worker tells of itself in `worker:<name>` with each renewal: who it is, and its engine's newest numbers."""

from collections.abc import Callable
from importlib.metadata import version

from worker.bridge import Bridge

# Totals since the engine's start, then what is now: whoever reads two heartbeats has the rates between them.
COUNTS = ("generation_tokens", "prompt_tokens", "prefix_hit_tokens", "prefix_prompt_tokens", "running", "waiting")


def heartbeat(worker: str, bridge: Bridge) -> Callable[[], dict[str, str]]:
    """A function that returns the fields of the hash as they are when it is called. Plain ints of the last snapshot."""
    info = bridge.info
    host, pid, _ = worker.rsplit("-", 2)
    facts = {
        "host": host,
        "pid": pid,
        "device": info.device,
        "capacity": str(info.max_sequences),
        "numerics": info.numerics,
        "version": version("gllm"),
        "vocabulary": str(info.vocab_size),
        "context": str(info.max_model_len),
        "blocks": str(info.kv_blocks),
    }

    def fields() -> dict[str, str]:
        stats = bridge.stats
        counts = {name: str(getattr(stats, name)) for name in COUNTS}
        return {**facts, **counts, "blocks_live": str(stats.blocks_live)}

    return fields
