"""Notices an engine that makes no progress though it has work. Nothing else tells a hanging device from a busy one."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

HANG_SECONDS = 60.0  # without a step while there is work: the longest step of a healthy engine takes a tenth of it
COMPILE_SECONDS = 15 * 60.0  # the same while kernels are compiled or graphs captured
LOOK_SECONDS = 1.0


class Progress(Protocol):
    """What is used of the bridge: when a step ended last (monotonic seconds), and what is being compiled now."""

    last_step: float
    compiling: str | None


async def hang(engine: Progress, stepping: Callable[[], bool]) -> str:
    """Wait until the engine hangs; what it failed to do, for people. `stepping`: whether it has something to step.

    Only time in which this process ran counts: after it was frozen itself, the engine's reports are still unread.
    """
    silent, seen, looked = 0.0, engine.last_step, time.monotonic()
    while silent <= limit(engine):
        await asyncio.sleep(LOOK_SECONDS)
        now = time.monotonic()
        silent += min(now - looked, 2 * LOOK_SECONDS)
        if engine.last_step != seen or not stepping():
            silent, seen = 0.0, engine.last_step
        looked = now
    compiling = f" while compiling {engine.compiling}" if engine.compiling else ""
    return f"no step ended in {limit(engine):g} s with work to do{compiling}"


def limit(engine: Progress) -> float:
    """Seconds of silence that the engine is granted now."""
    return COMPILE_SECONDS if engine.compiling else HANG_SECONDS
