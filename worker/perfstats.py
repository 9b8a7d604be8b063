"""The periodic log event `perfstats`: what the engine did since the one before."""

import asyncio
import time
from collections.abc import Callable

import structlog

from engine.request import Stats
from worker.logs import PERFSTATS

INTERVAL_SECONDS = 10.0  # long enough to be cheap to keep, short enough to watch by eye


class PerfStats:
    """Turns successive snapshots into the numbers of each interval. `clock` is `time.monotonic` but in tests."""

    def __init__(self, stats: Callable[[], Stats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._before = stats()
        self._since = clock()

    def interval(self) -> dict[str, int | float | None]:
        """The numbers since the last call. What nothing was counted for is None: no admission, step or pool.

        `busy` is the share of the time with a step under way, `kv_use` that of the pool which running jobs hold.
        """
        before, now, time_now = self._before, self._stats(), self._clock()
        seconds = max(time_now - self._since, 1e-9)
        self._before, self._since = now, time_now
        hit = now.prefix_hit_tokens - before.prefix_hit_tokens
        steps, step_ns = now.steps - before.steps, now.step_ns - before.step_ns
        host_ns = now.step_host_ns - before.step_host_ns
        return {
            "seconds": round(seconds, 3),
            "steps": steps,
            "busy": round(min(1.0, step_ns / 1e9 / seconds), 4),  # a long step counts where it ends
            "step_seconds": _ratio(step_ns / 1e9, steps, 6),
            "step_host_seconds": _ratio(host_ns / 1e9, steps, 6),
            "prompt_tokens_per_second": round((now.prompt_tokens - before.prompt_tokens) / seconds, 1),
            "generation_tokens_per_second": round((now.generation_tokens - before.generation_tokens) / seconds, 1),
            "prefix_cache_hit_tokens": hit,
            "prefix_cache_hit_rate": _ratio(hit, now.prefix_prompt_tokens - before.prefix_prompt_tokens),
            "kv_use": _ratio(now.blocks_live, now.blocks_live + now.blocks_reclaimable + now.blocks_free),
            "preemptions": now.preemptions - before.preemptions,
            "running": now.running,
            "waiting": now.waiting,
        }


def _ratio(part: float, whole: float, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole > 0 else None


async def report(stats: Callable[[], Stats], interval: float = INTERVAL_SECONDS) -> None:
    """Log an event each `interval` seconds until cancelled; one in which nothing was stepped is logged at debug."""
    log = structlog.get_logger()
    perf = PerfStats(stats)
    while True:
        await asyncio.sleep(interval)
        numbers = perf.interval()
        write = log.info if numbers["steps"] else log.debug
        write(PERFSTATS, **numbers)
