"""How a worker ends: drain, grace time, second signal, and an engine that dies or hangs."""

import asyncio
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from gllm.protocol import Error
from tests.servers import first_kind
from tests.worker.fake_engine import FakeEngine, script
from tests.worker.service_bench import ServiceBench
from worker.jobs import Jobs
from worker.queue import Queue
from worker.service import FAILED, OK

HELLO = [3 + byte for byte in b"hello"]


@pytest.fixture
def server_kind() -> str:
    """One kind of server is enough here: what depends on the server is tested with the scripts and the outages."""
    return first_kind()


async def test_sigterm_lets_jobs_end_and_hands_back_what_has_not_begun(crew: ServiceBench) -> None:
    worker = await crew.start(engine=FakeEngine(max_sequences=2))
    for job_id in ("a", "b", "c"):
        await crew.submit(job_id, max_tokens=300)
    await crew.published("b", 3)

    status = await worker.stop()

    assert status == OK
    ended = [job_id for job_id in ("a", "b", "c") if await crew.bench.field(job_id, "state") == "ended"]
    assert ended == ["a", "b"]
    assert await crew.bench.redis.zcard(crew.bench.keys.workers) == 0
    assert worker.engine.closed


async def test_fault_of_ours_while_draining_is_a_failure_and_hands_the_jobs_back(
    crew: ServiceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=4000)
    await crew.published("a", 5)

    def broken(self: Jobs) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Jobs, "wait_empty", broken)

    assert await worker.stop() == FAILED
    assert await crew.bench.field("a", "state") is None


async def test_grace_time_over_releases_the_rest_and_another_worker_goes_on_at_once(crew: ServiceBench) -> None:
    first = await crew.start(lease=30.0, grace=0.2, engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=400)
    await crew.published("a", 5)
    began = time.monotonic()

    assert await first.stop() == OK
    second = await crew.start(lease=30.0)
    reply = await crew.reply("a")

    assert time.monotonic() - began < 10  # no lease had to run out
    assert reply.ids == script(HELLO, 400)
    assert reply.resumes[0].worker == second.service.name
    assert await crew.bench.field("a", "attempts") == "0"


async def test_job_whose_entry_was_deleted_is_ended_here_when_nobody_could_take_it_over(crew: ServiceBench) -> None:
    worker = await crew.start(grace=0.1, engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=4000)
    await crew.published("a", 5)
    await crew.bench.redis.xtrim(crew.bench.keys.jobs("normal", 0), 0, approximate=False)

    assert await worker.stop() == OK
    reply = await crew.reply("a")

    assert isinstance(reply.end, Error)
    assert (reply.end.code, reply.end.retryable) == ("internal", True)
    assert reply.ids == script(HELLO, 4000)[: len(reply.ids)]


async def test_second_sigterm_releases_at_once(crew: ServiceBench) -> None:
    worker = await crew.start(grace=60.0, engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=4000)
    await crew.published("a", 3)

    worker.service.shutdown.signal()
    await crew.until(lambda: worker.service.health.state == "draining", "the drain")
    began = time.monotonic()
    status = await worker.stop()

    assert (status, time.monotonic() - began < 5) == (OK, True)
    assert await crew.bench.field("a", "state") is None
    assert await crew.bench.pending() == 1


async def test_draining_worker_is_not_ready_claims_nothing_and_keeps_its_lease(crew: ServiceBench) -> None:
    worker = await crew.start(lease=0.3, engine=FakeEngine(step_seconds=0.01))
    await crew.submit("a", max_tokens=100)
    await crew.published("a", 3)
    worker.service.shutdown.signal()
    await crew.until(lambda: worker.service.health.state == "draining", "the drain")
    await crew.submit("b")

    assert not worker.ready
    assert worker.service.health.live
    assert await worker.task == OK
    assert await crew.bench.field("a", "claims") == "1"
    assert await crew.bench.field("b", "state") is None


async def test_dying_engine_hands_jobs_back_and_charges_only_those_of_its_step(crew: ServiceBench) -> None:
    worker = await crew.start()
    for job_id in ("a", "b"):
        await crew.submit(job_id, max_tokens=4000)
        await crew.published(job_id, 3)

    worker.engine.die("out of memory", ["b"])
    status = await worker.task

    assert status == FAILED
    assert not worker.service.health.live
    assert [await crew.bench.field(job_id, "attempts") for job_id in ("a", "b")] == ["0", "1"]
    assert await crew.bench.pending() == 2
    second = await crew.start()
    await crew.until(lambda: len(second.engine.added) == 2, "both jobs in another engine")
    assert {request.id: request.isolate for request in second.engine.added} == {"a": False, "b": True}


async def test_sigterm_while_starting_ends_at_once(crew: ServiceBench) -> None:
    worker = await crew.start(redis="redis://127.0.0.1:1/0", wait=False)
    await asyncio.sleep(0)

    assert await worker.stop() == OK


DOWNLOADING = """
import threading
from concurrent.futures import ThreadPoolExecutor
from worker import service, startup
from worker.config import Settings

def download(name):
    with ThreadPoolExecutor(1) as pool:  # as the hub's client does
        pool.submit(print, "downloading", flush=True)
        pool.submit(threading.Event().wait).result()

startup.resolve_model = download
raise SystemExit(service.run(Settings(model="far/away", metrics_port=0)))
"""


def test_sigterm_ends_a_worker_whose_download_cannot_be_stopped() -> None:
    command = [sys.executable, "-c", DOWNLOADING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker:
        assert worker.stdout is not None
        try:
            assert any(line == "downloading\n" for line in worker.stdout)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(10) == OK
        finally:
            worker.kill()


async def test_renewal_in_flight_does_not_sign_a_worker_in_again_that_has_left(
    crew: ServiceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, on_its_way, tasks = Queue.renew, asyncio.Event(), []

    async def late(queue: Queue, *args: Any) -> Any:
        """The server executes what was sent, also when nobody waits for the answer any more."""
        await asyncio.sleep(0.2)
        return await renew(queue, *args)

    async def sent(queue: Queue, *args: Any) -> Any:
        tasks.append(asyncio.create_task(late(queue, *args)))
        on_its_way.set()
        return await asyncio.shield(tasks[-1])

    worker = await crew.start(lease=3.0)
    monkeypatch.setattr(Queue, "renew", sent)
    await asyncio.wait_for(on_its_way.wait(), 10)

    assert await worker.stop() == OK
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await crew.bench.redis.zcard(crew.bench.keys.workers) == 0
