"""The blocking client: the same answers, from threads, beside a running loop, and clean in its end."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from gllm.keys import Keys
from gllm.protocol import InvalidJob
from gllm.reply import JobFailed, ReplyExpired
from gllm.sync import SyncClient
from tests.gllm.scribe import Scribe


@pytest.fixture
def sync_client(redis_url: str, keys: Keys) -> Iterator[SyncClient]:
    with SyncClient(redis_url, keys.queue) as client:
        yield client


def test_sync_client_submits_streams_and_collects(
    sync_client: SyncClient, raw: redis.Redis, keys: Keys, scribe: Scribe
) -> None:
    assert sync_client.submit(prompt="x", id=scribe.id, priority="low") == scribe.id
    scribe.hello()
    assert "".join(reply.text for reply in sync_client.stream(scribe.id)) == "Hello world"
    assert sync_client.result(scribe.id).text == "Hello world"
    assert sync_client.cancel(scribe.id) is False
    assert raw.xlen(keys.jobs("low", 0)) == 1


def test_sync_client_raises_what_the_client_raises(sync_client: SyncClient, scribe: Scribe) -> None:
    with pytest.raises(InvalidJob, match="top_p"):
        sync_client.submit(prompt="x", top_p=5)
    with pytest.raises(TimeoutError):
        sync_client.result(scribe.id, timeout=0.1)
    scribe.error()
    with pytest.raises(JobFailed, match="top_p: no"):
        sync_client.result(scribe.id)
    scribe.raw.delete(scribe.out)
    with pytest.raises(ReplyExpired):
        list(sync_client.stream(scribe.id))


def test_sync_client_streams_live_and_resumes(sync_client: SyncClient, scribe: Scribe) -> None:
    scribe.tokens(0, 0, [1], "a")
    stream = sync_client.stream(scribe.id)
    first = next(stream)
    stream.close()
    writer = threading.Timer(0.2, lambda: (scribe.tokens(1, 1, [2], "b"), scribe.done(2)))
    writer.start()
    assert "".join(reply.text for reply in sync_client.stream(scribe.id, first.entry)) == "b"
    writer.join()


def test_sync_client_is_shared_by_threads(sync_client: SyncClient, raw: redis.Redis, keys: Keys) -> None:
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda n=number: texts.append(sync_client.result(f"job{n}").text))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for number in range(8):
        Scribe(raw, keys, f"job{number}").hello()
    for thread in threads:
        thread.join(10)
    assert texts == ["Hello world"] * 8


async def test_sync_client_works_beside_a_running_loop(sync_client: SyncClient, scribe: Scribe) -> None:
    scribe.hello()
    assert sync_client.result(scribe.id).text == "Hello world"


def test_sync_client_says_that_it_is_closed(redis_url: str, scribe: Scribe) -> None:
    client = SyncClient(redis_url)
    stream = client.stream(scribe.id)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.submit(prompt="x")
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_sync_client_leaves_no_thread_behind(redis_url: str) -> None:
    before = threading.active_count()
    with SyncClient(redis_url):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_sync_client_a_dropped_stream_blocks_nobody(sync_client: SyncClient, scribe: Scribe) -> None:
    """The collector may run in the client's own thread, where waiting for that thread would never end."""
    scribe.hello()
    stream = sync_client.stream(scribe.id)
    next(stream)
    collected = threading.Event()

    def drop() -> None:
        nonlocal stream
        del stream
        gc.collect()
        collected.set()

    sync_client._loop._loop.call_soon_threadsafe(drop)
    assert collected.wait(5)
    assert sync_client.result(scribe.id).text == "Hello world"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sync_client_made_before_a_fork_says_so(redis_url: str) -> None:
    script = f"""
import os, sys
from gllm import SyncClient
client = SyncClient({redis_url!r})
client.cancel("x")
if os.fork() == 0:
    try:
        client.cancel("x")
    except RuntimeError as error:
        os._exit(0 if "before a fork" in str(error) else 2)
    os._exit(3)
_, status = os.wait()
client.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 0


def test_sync_client_interrupted_wait_is_cancelled(redis_url: str, raw: redis.Redis, keys: Keys) -> None:
    script = f"""
import signal, sys, threading, time
from gllm import SyncClient
with SyncClient({redis_url!r}, {keys.queue!r}) as client:
    print("ready", flush=True)
    try:
        client.result("never")
    except KeyboardInterrupt:
        client.cancel("never")
        print("interrupted", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    end = time.monotonic() + 10
    while not any("b" in row["flags"] and row["name"] == "gllm-reader" for row in raw.client_list()):
        assert time.monotonic() < end, "the reader does not wait"
        time.sleep(0.01)
    process.send_signal(2)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("interrupted\n", 0)
