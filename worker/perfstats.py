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
        """The numbers since the last call. The hit rate is None when no request was admitted."""
        before, now, time_now = self._before, self._stats(), self._clock()
        seconds = max(time_now - self._since, 1e-9)
        self._before, self._since = now, time_now
        hit = now.prefix_hit_tokens - before.prefix_hit_tokens
        prompt = now.prefix_prompt_tokens - before.prefix_prompt_tokens
        return {
            "seconds": round(seconds, 3),
            "steps": now.steps - before.steps,
            "prompt_tokens_per_second": round((now.prompt_tokens - before.prompt_tokens) / seconds, 1),
            "generation_tokens_per_second": round((now.generation_tokens - before.generation_tokens) / seconds, 1),
            "prefix_cache_hit_tokens": hit,
            "prefix_cache_hit_rate": round(hit / prompt, 4) if prompt > 0 else None,
            "preemptions": now.preemptions - before.preemptions,
            "running": now.running,
            "waiting": now.waiting,
        }


async def report(stats: Callable[[], Stats], interval: float = INTERVAL_SECONDS) -> None:
    """Log an event each `interval` seconds until cancelled; one in which nothing was stepped is logged at debug."""
    log = structlog.get_logger()
    perf = PerfStats(stats)
    while True:
        await asyncio.sleep(interval)
        numbers = perf.interval()
        write = log.info if numbers["steps"] else log.debug
        write(PERFSTATS, **numbers)
