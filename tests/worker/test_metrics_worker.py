"""What the page says of the queue, the worker's state, its lease, its start and its processes."""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gllm.connection import connect
from gllm.keys import Keys
from tests.worker.fake_engine import FakeEngine
from tests.worker.metrics_page import samples
from tests.worker.queue_bench import QueueBench, now_ms, until
from tests.worker.text_fixtures import engine_info
from worker.backlog import Backlog, by_priority
from worker.health import Health
from worker.jobs import Jobs
from worker.lease import Lease
from worker.link import Link
from worker.metrics import LeaseTime, Metrics, loop
from worker.metrics.processes import usage
from worker.metrics.queue import KNOWN_SECONDS, QueueNumbers
from worker.queue import Queue


def gauge(metrics: Metrics, name: str, priority: str = "normal") -> float | None:
    return samples(metrics).get(f'gllm_queue_{name}{{priority="{priority}"}}')


# -- the queue ----------------------------------------------------------------------------------------------------


def test_queue_numbers_are_those_of_the_last_look() -> None:
    metrics = Metrics()
    metrics.queue.renewal({"normal": Backlog(7, 5, 10_000), "low": Backlog()}, 12_500)
    assert [gauge(metrics, name) for name in ("depth", "lag", "oldest_seconds")] == [7, 5, 2.5]
    assert [gauge(metrics, name, "low") for name in ("depth", "lag", "oldest_seconds")] == [0, 0, 0]
    metrics.queue.claim({"normal": Backlog(3, 3), "low": Backlog(1, 1)})
    assert [gauge(metrics, name) for name in ("depth", "lag", "oldest_seconds")] == [3, 3, 2.5]


def test_queue_has_no_oldest_job_once_a_claim_has_emptied_it() -> None:
    metrics = Metrics()
    metrics.queue.renewal({"normal": Backlog(7, 5, 10_000)}, 12_500)
    metrics.queue.claim({"normal": Backlog()})
    assert gauge(metrics, "oldest_seconds") == 0


def test_queue_whose_entries_have_ids_of_the_future_is_not_negatively_old() -> None:
    metrics = Metrics()
    metrics.queue.renewal({"normal": Backlog(1, 1, 99_000)}, 12_500)
    assert gauge(metrics, "oldest_seconds") == 0


def test_queue_that_nobody_could_look_at_for_a_minute_is_not_shown() -> None:
    """An hour's old 0 would tell an autoscaler that nothing waits."""
    clock = [100.0]
    metrics = Metrics()
    metrics.queue = QueueNumbers(lambda: clock[0])
    metrics.queue.renewal({"normal": Backlog(7, 5, 10_000)}, 12_500)

    def shown() -> int:
        return sum(len(family.samples) for family in metrics.queue.collect())

    clock[0] += KNOWN_SECONDS
    assert shown() == 3
    clock[0] += 0.1
    assert shown() == 0
    metrics.queue.claim({"normal": Backlog(1, 1)})
    assert shown() == 2, "the age of the oldest is not known yet"


async def test_queue_of_a_long_lease_is_shown_from_renewal_to_renewal() -> None:
    """A full worker does not claim, so only its renewals look, each third of a lease."""
    for lease, life in ((15.0, KNOWN_SECONDS), (600.0, 600.0)):
        metrics, queue = Metrics(), Queue(connect("redis://127.0.0.1:1"), Keys("q"), "w", lease=lease)
        jobs = Jobs("w", engine_info(), FakeEngine(), metrics)
        Lease(queue, queue.redis, jobs, Link(Health(), metrics), metrics, {}, "model")
        assert metrics.queue.life == life
        assert samples(metrics)["gllm_lease_seconds"] == lease


def test_shards_of_a_priority_are_added_up_and_the_oldest_counts() -> None:
    streams = [("jobs:low:0", Backlog(1, 1, 70)), ("jobs:low:1", Backlog(4, 2, 50)), ("jobs:low:2", Backlog())]
    sums = by_priority(streams)
    assert sums == {"high": Backlog(), "normal": Backlog(), "low": Backlog(5, 3, 50)}


async def test_renewal_tells_depth_lag_and_the_oldest_job_of_each_priority(bench: QueueBench) -> None:
    worker = await bench.worker()
    first = await bench.submit("a", "low")
    for name in ("b", "c"):
        await bench.submit(name, "low")
    renewal = await worker.renew([], {})
    assert renewal.waiting == {"high": Backlog(), "normal": Backlog(), "low": Backlog(3, 3, int(first.split("-")[0]))}


async def test_released_job_waits_and_is_the_oldest_but_is_no_lag(bench: QueueBench) -> None:
    worker = await bench.worker()
    job = await bench.one(worker)
    await bench.submit("b")
    held = (await worker.renew([job], {})).waiting["normal"]
    assert (held.waiting, held.new) == (1, 1)
    await worker.release([job])
    released = (await worker.renew([], {})).waiting["normal"]
    assert released == Backlog(2, 1, job.submitted_ms)


async def test_lag_is_known_also_after_somebody_deleted_a_waiting_entry(bench: QueueBench) -> None:
    """Redis' own lag is null then, and autoscalers read 0."""
    worker = await bench.worker()
    entries = [await bench.submit(name) for name in "abc"]
    await bench.redis.xdel(bench.keys.jobs("normal", 0), entries[1])
    seen = (await worker.renew([], {})).waiting["normal"]
    assert (seen.waiting, seen.new) == (2, 2)


async def test_renewal_goes_on_where_a_stream_is_gone_or_is_none(bench: QueueBench) -> None:
    worker = await bench.worker()
    await bench.redis.delete(bench.keys.jobs("high", 0), bench.keys.jobs("normal", 0))
    await bench.redis.set(bench.keys.jobs("normal", 0), "no stream")
    await bench.submit("a", "low")
    renewal = await worker.renew([], {})
    assert [renewal.waiting[priority].waiting for priority in ("high", "normal", "low")] == [0, 0, 1]
    assert abs(renewal.now_ms - await now_ms(bench.redis)) < 5000


# -- the worker ---------------------------------------------------------------------------------------------------


def test_state_is_one_of_four_and_ready_is_what_the_probe_says() -> None:
    metrics = Metrics()
    for state in ("starting", "ready", "draining", "failed"):
        metrics.worker.state = lambda state=state: (state, state == "ready")
        found = samples(metrics)
        shown = {name: value for name, value in found.items() if name.startswith("gllm_worker_state")}
        assert [name for name, value in shown.items() if value == 1] == [f'gllm_worker_state{{state="{state}"}}']
        assert len(shown) == 4
        assert found["gllm_worker_ready"] == (state == "ready")


def test_lease_has_an_age_once_it_is_held() -> None:
    metrics = Metrics()
    assert not [name for name in samples(metrics) if name.startswith("gllm_lease")]
    metrics.worker.lease = lambda: LeaseTime(15.0, time.monotonic() - 7.0)
    found = samples(metrics)
    assert 7.0 <= found["gllm_lease_age_seconds"] < 60.0
    assert found["gllm_lease_seconds"] == 15.0
    metrics.worker.lease = lambda: LeaseTime(15.0, time.monotonic() + 7.0)
    assert samples(metrics)["gllm_lease_age_seconds"] == 0


def test_start_up_is_told_by_phase() -> None:
    metrics = Metrics()
    for phase, seconds in (("find", 0.5), ("model", 30.0), ("graphs", 2.0), ("tuning", 3.0), ("redis", -1.0)):
        metrics.worker.phase(phase, seconds)
    found = {name: value for name, value in samples(metrics).items() if "startup" in name}
    assert found == {
        'gllm_startup_seconds{phase="find"}': 0.5,
        'gllm_startup_seconds{phase="model"}': 30.0,
        'gllm_startup_seconds{phase="redis"}': 0.0,
        'gllm_startup_seconds{phase="other"}': 5.0,
    }


def test_build_names_its_versions() -> None:
    (series,) = [name for name in samples(Metrics()) if name.startswith("gllm_build_info")]
    assert 'torch="2.' in series
    assert 'python="3.' in series
    assert 'version="' in series


# -- its processes and its loop -----------------------------------------------------------------------------------

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")


@needs_proc
def test_usage_of_a_process_grows_with_its_work() -> None:
    before = usage(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    after = usage(os.getpid())
    assert before is not None
    assert after is not None
    assert after[0] - before[0] >= 0.02  # /proc counts in hundredths
    assert after[1] > 10_000_000


@needs_proc
def test_processes_are_worker_and_engine_and_time_stands_when_one_ends() -> None:
    metrics = Metrics()
    metrics.processes.engine = os.getppid
    before = samples(metrics)
    assert before['gllm_process_resident_memory_bytes{process="engine"}'] > 0
    metrics.processes.engine = lambda: 2**22 + 1  # more than any process id
    after = samples(metrics)
    name = 'gllm_process_cpu_seconds_total{process="engine"}'
    assert after[name] == before[name]
    assert 'gllm_process_resident_memory_bytes{process="engine"}' not in after
    assert usage(2**22 + 1) is None


async def test_loop_that_is_blocked_is_seen_to_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TICK_SECONDS", 0.01)
    metrics = Metrics()

    def ticks(count: int) -> Callable[[], Awaitable[object]]:
        async def enough() -> bool:
            return metrics.loop_lag.count >= count

        return enough

    task = asyncio.create_task(loop.watch(metrics.loop_lag))
    await until(ticks(1), "a tick")
    time.sleep(0.3)  # noqa: ASYNC251 - that is what must be seen
    await until(ticks(3), "two more")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    found = samples(metrics)
    assert found["gllm_loop_lag_seconds_count"] - found['gllm_loop_lag_seconds_bucket{le="0.25"}'] >= 1
    assert found["gllm_loop_lag_seconds_sum"] >= 0.25
