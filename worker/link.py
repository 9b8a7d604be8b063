"""Whether Redis can be worked with now. Any part that sees it fail says so; the lease loop sees when it is back."""

import asyncio
import time

import structlog

from worker import logs
from worker.connection import Fault, classify
from worker.health import Health
from worker.metrics import Metrics

BLOCK = "redis"


class Link:
    """Up, or lost since a moment. A fatal error (wrong password, a bug) ends the worker through `fatal`."""

    def __init__(self, health: Health, metrics: Metrics) -> None:
        self._health = health
        self._metrics = metrics
        self._up = asyncio.Event()
        self._lost_at: float | None = None  # None: it was never up
        self._log = structlog.get_logger()
        self.fatal: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @property
    def up(self) -> bool:
        return self._up.is_set()

    async def wait_up(self) -> None:
        await self._up.wait()

    def lost(self, error: Exception) -> Fault:
        """A command failed. Readiness goes at once; one log line per outage."""
        fault = classify(error)
        self._metrics.redis_error(fault)
        if fault == "fatal" and not self.fatal.done():
            self.fatal.set_result(error)
        text = f"{type(error).__name__}: {logs.without_value(str(error))}"
        self._health.block(BLOCK, text)
        if self.up:
            self._up.clear()
            self._lost_at = time.monotonic()
            self._log.warning(logs.REDIS_LOST, error=text, fault=fault)
        return fault

    def restored(self) -> None:
        """A renewal went through: jobs and heartbeat are ours again."""
        if not self.up:
            self._up.set()
            self._health.unblock(BLOCK)
            if self._lost_at is not None:
                self._metrics.recovery("reconnected")
                self._log.info(logs.REDIS_RECOVERED, seconds=round(time.monotonic() - self._lost_at, 3))
