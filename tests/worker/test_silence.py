"""A person who waits for a reply that does not come is told why."""

import os
import threading
import time

import pytest
from click.testing import CliRunner

from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.gllm.scribe import Scribe
from tests.servers import Server
from worker.cli import main


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.commands.silence.SILENT_SECONDS", 0.2)
    for name in [name for name in os.environ if name.startswith("GLLM_")]:
        monkeypatch.delenv(name)


def tail(url: str, queue: str, *arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(main, [*arguments, "--redis", url, "--queue", queue])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_tail_says_that_nobody_knows_the_job_and_goes_on(redis_url: str, keys: Keys) -> None:
    with connect_sync(redis_url) as raw:
        writer = threading.Timer(0.6, lambda: Scribe(raw, keys, "nosuch").hello())
        writer.start()
        said = tail(redis_url, keys.queue, "tail", "nosuch")
        writer.join()
    assert said == (
        "Hello world\n",
        f"queue {keys.queue} knows no job nosuch: never submitted to it, or its reply is no longer kept "
        "(no worker alive); still waiting\n",
    )


def test_submit_says_that_nobody_takes_the_job(redis_url: str, keys: Keys) -> None:
    with connect_sync(redis_url) as raw:
        raw.zadd(keys.workers, {"w": 1000 * int(time.time())})
        raw.hset(keys.worker("w"), mapping={"lease": 15000})
        raw.expire(keys.worker("w"), 60)
        writer = threading.Timer(0.6, lambda: Scribe(raw, keys, "job1").hello())
        writer.start()
        out, err = tail(redis_url, keys.queue, "submit", "Hi", "--id", "job1")
        writer.join()
    assert out == "Hello world\n"
    assert err == f"job job1\njob job1 is waiting in queue {keys.queue} (1 worker alive); still waiting\n"


def test_silence_in_the_middle_of_a_reply_is_not_remarked_on(redis_url: str, keys: Keys) -> None:
    with connect_sync(redis_url) as raw:
        scribe = Scribe(raw, keys, "job1")
        scribe.start()
        scribe.tokens(0, 0, [1], "a")
        writer = threading.Timer(0.6, lambda: (scribe.tokens(1, 1, [2], "b"), scribe.done(2)))
        writer.start()
        assert tail(redis_url, keys.queue, "tail", "job1") == ("ab\n", "")
        writer.join()


def test_user_who_may_not_look_waits_all_the_same(own_server: Server, queue_name: str) -> None:
    keys = Keys(queue_name)
    with connect_sync(own_server.url) as raw:
        scripts = ("-eval", "-evalsha", "-eval_ro", "-evalsha_ro")
        raw.execute_command("ACL", "SETUSER", "ann", "on", ">pw", f"~{keys.base}*", "+@all", *scripts)
        writer = threading.Timer(0.6, lambda: Scribe(raw, keys, "job1").hello())
        writer.start()
        out, err = tail(own_server.url.replace("://", "://ann:pw@"), queue_name, "tail", "job1")
        writer.join()
    assert out == "Hello world\n"
    assert err.startswith("no event of job job1 yet (Redis at redis://ann:***@")
    assert err.endswith("); still waiting\n")
