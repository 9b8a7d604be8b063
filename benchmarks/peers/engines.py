"""Which engines there are, and each one's form of the model, made once."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.process import Peer

POOL_TOKENS = 16 * 1024 + 2048  # room for 16 jobs of 816 tokens and what is kept of earlier ones
BLOCK_SIZE = 16
CACHE_GIGABYTES = 3  # of peers that want their cache in these
NAMES = (
    "gllm", "gllm no cache", "gllm int8", "gllm int4", "vllm", "openvino", "openvino int8", "llama.cpp",
    "llama.cpp q8_0", "llama.cpp q4_0", "transformers",
)  # fmt: skip


def engines(model: Path, work: Path, threads: int, names: list[str]) -> list[Peer]:
    """Those of `names` that are installed, their files made; says on standard error which are not.

    Raises ValueError for a name that is none of NAMES.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"engines: some of {', '.join(NAMES)} expected, got {', '.join(unknown)}")
    found = [_engine(name, model, work, threads) for name in names]
    for peer in found:
        if not peer.installed:
            print(f"{peer.name} is left out: {peer.python} is not there (make peers)", file=sys.stderr)
    return [_prepared(peer, model, work) for peer in found if peer.installed]


def _engine(name: str, model: Path, work: Path, threads: int) -> Peer:
    """The options name the form of the model that `_prepared` makes."""
    module, _, variant = name.partition(" ")
    environment = None if module in ("gllm", "transformers") else module.replace("llama.cpp", "llama")
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "gllm": lambda: _ours(model, variant),
        "vllm": lambda: {"model": str(model), "cache_gigabytes": CACHE_GIGABYTES, "bind": _processors(threads)},
        "openvino": lambda: {
            "model": str(work / f"openvino-{model.name}-{variant or 'bf16'}"),
            "cache_gigabytes": CACHE_GIGABYTES,
            "precision": "bf16",
        },
        "llama.cpp": lambda: {
            "model": str(work / f"{model.name}-{variant or 'bf16'}.gguf"),
            "context": POOL_TOKENS,
        },
        "transformers": lambda: {"model": str(model)},
    }
    options = {**makers[module](), "threads": threads}
    return Peer(
        name=name,
        module=f"benchmarks.peers.{module.partition('.')[0]}_engine",
        environment=environment,
        options=options,
    )


def _ours(model: Path, variant: str) -> dict[str, Any]:
    options = {"model": str(model), "block_size": BLOCK_SIZE, "kv_blocks": POOL_TOKENS // BLOCK_SIZE}
    if variant in ("int8", "int4"):
        options["quantize"] = variant
    return {**options, "prefix_cache": variant != "no cache"}


def _processors(threads: int) -> str:
    return ",".join(str(number) for number in sorted(os.sched_getaffinity(0))[:threads])


def _prepared(peer: Peer, model: Path, work: Path) -> Peer:
    """Make what the engine's options name, where it is not there yet."""
    from benchmarks.peers import checkpoints

    path = Path(peer.options["model"])
    if not path.exists() and path.suffix == ".gguf":
        checkpoints.write_gguf(model, path, path.stem.rpartition("-")[2])
    elif not path.exists():
        weights = {"bf16": "fp16"}.get(path.name.rpartition("-")[2], path.name.rpartition("-")[2])
        checkpoints.write_openvino(model, path, weights)
    return peer
