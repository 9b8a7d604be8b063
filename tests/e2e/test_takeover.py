"""Real workers, killed or frozen in the middle of a reply: the client sees every token once, and the same ones."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import redis

import gllm
from gllm.keys import GROUP, Keys
from gllm.protocol import Resume
from tests.e2e.conftest import Start
from tests.e2e.worker_process import WorkerProcess

LONG: dict[str, Any] = {"prompt": "abcdefgh", "max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"seed": 7, "temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.3, "logprobs": 1}


class Reader(threading.Thread):
    """A client that streams one reply from its submission on."""

    def __init__(self, url: str, queue: str, job: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._place, self._job = (url, queue), job
        self.id = ""
        self.ids: list[int] = []
        self.text = ""
        self.resumes: list[Resume] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with gllm.SyncClient(*self._place) as client:
                self.id = client.submit(**self._job)
                for reply in client.stream(self.id):
                    self.ids += reply.ids
                    self.text += reply.text
                    self.resumes += [reply.event] if isinstance(reply.event, Resume) else []
        except Exception as error:
            self.error = error

    def wait_tokens(self, count: int) -> None:
        end = time.monotonic() + 60
        while len(self.ids) < count:
            assert time.monotonic() < end, f"{len(self.ids)} tokens in 60 s; {self.error}"
            time.sleep(0.002)

    def finish(self) -> None:
        self.join(60)
        assert not self.is_alive(), f"no end after {len(self.ids)} tokens"
        if self.error:
            raise self.error


def owner(client: redis.Redis, keys: Keys, job_id: str, workers: list[WorkerProcess]) -> WorkerProcess:
    """The worker that has a job now."""
    name = client.hget(keys.job(job_id), "worker").decode()
    return next(worker for worker in workers if f"-{worker.process.pid}-" in name)


@pytest.mark.parametrize("job", [LONG, LONG | SAMPLED], ids=["greedy", "sampled"])
def test_kill_9_in_the_middle_changes_no_token(
    start: Start, one_url: str, queue_name: str, redis_client: redis.Redis, job: dict[str, Any]
) -> None:
    workers = [start(), start()]
    for worker in workers:
        worker.wait_event("ready")
    undisturbed = Reader(one_url, queue_name, job)
    undisturbed.finish()
    reader = Reader(one_url, queue_name, job)
    reader.wait_tokens(30)

    owner(redis_client, Keys(queue_name), reader.id, workers).end()
    reader.finish()

    assert (reader.ids, reader.text) == (undisturbed.ids, undisturbed.text)
    assert [resume.exact for resume in reader.resumes] == [True]
    with gllm.SyncClient(one_url, queue_name) as client:
        ours, theirs = client.result(reader.id), client.result(undisturbed.id)
    assert ours.logprobs == theirs.logprobs
    assert ours.usage.completion_tokens == 400


def test_frozen_worker_that_wakes_up_disturbs_nothing(
    start: Start, one_url: str, queue_name: str, redis_client: redis.Redis
) -> None:
    workers = [start("--lease", "1"), start("--lease", "1")]
    for worker in workers:
        worker.wait_event("ready")
    undisturbed = Reader(one_url, queue_name, LONG)
    undisturbed.finish()
    reader = Reader(one_url, queue_name, LONG)
    reader.wait_tokens(30)
    zombie = owner(redis_client, Keys(queue_name), reader.id, workers)

    os.kill(zombie.process.pid, signal.SIGSTOP)
    try:
        end = time.monotonic() + 60
        while not reader.resumes:
            assert time.monotonic() < end, "nobody took the job over"
            time.sleep(0.01)
    finally:
        os.kill(zombie.process.pid, signal.SIGCONT)
    reader.finish()

    assert (reader.ids, reader.text) == (undisturbed.ids, undisturbed.text)
    zombie.wait_event("job_fenced")
    for stream in Keys(queue_name).streams(1):
        assert redis_client.xpending(stream, GROUP)["pending"] == 0


def test_supervisor_that_restarts_a_lone_worker_gets_the_reply_to_its_end(
    start: Start, one_url: str, queue_name: str
) -> None:
    first = start()
    first.wait_event("ready")
    reader = Reader(one_url, queue_name, LONG)
    reader.wait_tokens(30)
    first.end()
    start().wait_event("ready")
    reader.finish()

    assert len(reader.ids) == 400
    assert len(reader.resumes) == 1
