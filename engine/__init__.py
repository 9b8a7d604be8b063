"""Continuous batching on one device: tokens in, tokens out. No Redis, no asyncio, no text.

`Engine` is loaded on first use, so that the worker's parent process can import the plain structs without torch.
"""

import os
from typing import TYPE_CHECKING

# Read by OpenMP when torch is loaded, which comes after this. Its threads spin for milliseconds by default: beside the
# threads of our kernels, or any other process, that made steps ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from engine.config import EngineConfig
from engine.request import Delta, FinishReason, Request, SamplingParams, Stats, Usage

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = ["Delta", "Engine", "EngineConfig", "FinishReason", "Request", "SamplingParams", "Stats", "Usage"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
