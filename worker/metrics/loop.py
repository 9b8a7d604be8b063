"""How late the event loop is: whatever blocks it delays renewals, tokens and probes alike."""

import asyncio
import time

from worker.metrics.values import Seconds

TICK_SECONDS = 0.1  # a pause of that length is seen for certain, a shorter one by chance


async def watch(lag: Seconds) -> None:
    """Until cancelled: sleep, and note by how much that took longer than it should."""
    while True:
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lag.observe(time.monotonic() - due)
