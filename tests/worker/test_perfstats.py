"""The `perfstats` event: differences of snapshots, once an interval."""

import asyncio
import contextlib
from itertools import chain, repeat

import pytest
from structlog.testing import capture_logs

from engine.request import Stats
from worker import perfstats
from worker.perfstats import PerfStats


class Snapshots:
    """Stands in for the bridge: the test says what the newest snapshot is, and what time it is."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.time = 1000.0

    def perf(self) -> PerfStats:
        return PerfStats(lambda: self.stats, lambda: self.time)


def test_interval_reports_what_happened_in_it_and_nothing_before() -> None:
    source = Snapshots()
    source.stats = Stats(prefix_hit_tokens=100, prefix_prompt_tokens=100, generation_tokens=7, steps=3)
    perf = source.perf()
    source.time += 2.0
    source.stats = Stats(
        prefix_hit_tokens=130, prefix_prompt_tokens=140, prompt_tokens=10, generation_tokens=27, preemptions=1,
        running=2, waiting=5, steps=8, step_ns=1_500_000_000, step_host_ns=250_000_000, blocks_live=3, blocks_free=1,
    )  # fmt: skip
    assert perf.interval() == {
        "seconds": 2.0,
        "steps": 5,
        "busy": 0.75,
        "step_seconds": 0.3,
        "step_host_seconds": 0.05,
        "prompt_tokens_per_second": 5.0,
        "generation_tokens_per_second": 10.0,
        "prefix_cache_hit_tokens": 30,
        "prefix_cache_hit_rate": 0.75,
        "kv_use": 0.75,
        "preemptions": 1,
        "running": 2,
        "waiting": 5,
    }


def test_interval_without_admissions_has_no_hit_rate() -> None:
    source = Snapshots()
    perf = source.perf()
    source.time += 1.0
    source.stats = Stats(generation_tokens=4, steps=4, running=1)
    numbers = perf.interval()
    assert numbers["prefix_cache_hit_rate"] is None
    assert numbers["prefix_cache_hit_tokens"] == 0


def test_interval_without_steps_or_a_pool_divides_nothing() -> None:
    source = Snapshots()
    perf = source.perf()
    source.time += 1.0
    numbers = perf.interval()
    assert (numbers["step_seconds"], numbers["step_host_seconds"], numbers["kv_use"]) == (None, None, None)
    assert (numbers["busy"], numbers["steps"]) == (0, 0)


def test_intervals_add_up_to_the_totals() -> None:
    source = Snapshots()
    perf = source.perf()
    hits = tokens = 0.0
    for step in range(1, 6):
        source.time += 0.5 * step
        source.stats = Stats(prefix_hit_tokens=3 * step, prefix_prompt_tokens=4 * step, generation_tokens=step**2)
        numbers = perf.interval()
        hits += numbers["prefix_cache_hit_tokens"] or 0
        tokens += (numbers["generation_tokens_per_second"] or 0) * (numbers["seconds"] or 0)
    assert hits == 15
    assert tokens == pytest.approx(25, abs=0.5)


def test_two_reads_at_one_instant_divide_by_no_zero() -> None:
    source = Snapshots()
    perf = source.perf()
    assert perf.interval()["generation_tokens_per_second"] == 0.0


async def test_report_logs_busy_intervals_as_info_and_idle_ones_as_debug() -> None:
    """The third interval is busy, the others are idle."""
    busy = Stats(steps=9, generation_tokens=9, prefix_hit_tokens=16, prefix_prompt_tokens=32)
    snapshots = chain([Stats()] * 3, repeat(busy))
    enough = asyncio.Event()
    reads = 0

    def read() -> Stats:
        nonlocal reads
        reads += 1
        if reads > 6:
            enough.set()
        return next(snapshots)

    with capture_logs() as events:
        task = asyncio.create_task(perfstats.report(read, interval=0.005))
        await asyncio.wait_for(enough.wait(), 10)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert [event["log_level"] for event in events[:5]] == ["debug", "debug", "info", "debug", "debug"]
    assert {event["event"] for event in events} == {"perfstats"}
    assert (events[2]["prefix_cache_hit_tokens"], events[2]["prefix_cache_hit_rate"]) == (16, 0.5)
