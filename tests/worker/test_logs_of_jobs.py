"""Log lines about jobs: each names job, epoch and attempt, is one JSON line, and never holds what a job contains."""

import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from gllm.protocol import Error
from tests.servers import binaries, require
from tests.worker.fake_engine import FakeEngine
from tests.worker.queue_bench import now_ms
from tests.worker.service_bench import ServiceBench
from tests.worker.text_fixtures import byte_level_backend, loaded
from worker import logs
from worker.tokenizer import Tokenizer

pytestmark = pytest.mark.parametrize("server_kind", require(binaries())[:1], indirect=True)  # one is enough here
CANARY = "qxzcanary"
REFUSING_TEMPLATE = "{{ raise_exception('no such role: ' + messages[0].content) }}"
NASTY = f"{CANARY}\n\r\x00\x1b[31m\u2028\x85\"'}} \ud800 \U0001f600" + CANARY * 500
BAD_BODIES = {
    "broken": f'{{"prompt": "{CANARY}',
    "no_job": json.dumps([CANARY]),
    "unknown": json.dumps({"prompt": "x", CANARY: 1}),
    "unknown_value": json.dumps({"prompt": "x", "colour": CANARY}),
    "wrong_type": json.dumps({"prompt": "x", "max_tokens": CANARY}),
    "wrong_stop": json.dumps({"prompt": "x", "stop": [CANARY, 1]}),
    "wrong_bias": json.dumps({"prompt": "x", "logit_bias": {CANARY: 1}}),
    "wrong_role": json.dumps({"messages": [{"role": 1, "content": CANARY}]}),
    "two_sources": json.dumps({"prompt": CANARY, "token_ids": [1]}),
    "metadata": json.dumps({"prompt": "x", "metadata": {"a": CANARY * 1000}}),
    "surrogate": json.dumps({"prompt": NASTY}),
    "refused_chat": json.dumps({"messages": [{"role": "user", "content": CANARY}]}),
    "huge": json.dumps({"prompt": CANARY * 3000}),
}
BAD_FIELDS = {"version": {"v": CANARY}, "deadline": {"deadline": CANARY}, "not_before": {"not_before": CANARY}}
GOOD = json.dumps({"prompt": CANARY, "max_tokens": 4})
LONG = json.dumps({"prompt": CANARY, "max_tokens": 4000})


@pytest.fixture(params=["json", "console"])
def log_format(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, log_format: Any) -> Iterator[Callable[[], str]]:
    """Everything that is logged meanwhile, on the lowest level, as a worker would write it."""
    root, stderr = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    for owner, hook in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(owner, hook, getattr(owner, hook))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        logs.configure(log_format, "debug")
    yield stderr.getvalue
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def broken_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that fails on one prompt, and quotes it."""
    encode = Tokenizer.encode

    def fail(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if text.startswith("boom"):
            raise RuntimeError(f"cannot encode {text!r}")
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", fail)


async def everything(crew: ServiceBench) -> list[str]:
    """Let everything happen that can happen to a job, all of them with the canary somewhere; the ids."""
    crew.tokenizer = loaded(byte_level_backend(), chat_template=REFUSING_TEMPLATE, eos_token="<|endoftext|>")
    first = await crew.start(engine=FakeEngine(step_seconds=0.001))
    first.engine.refuse["engine"] = "invalid", f"tokens: whole numbers expected, got {CANARY}"
    ended = [*BAD_BODIES, *BAD_FIELDS, "good", "engine", "crash", "overdue", "cancelled", "labels"]
    for name, body in BAD_BODIES.items():
        await crew.bench.submit(name, body=body)
    for name, fields in BAD_FIELDS.items():
        await crew.bench.submit(name, body=GOOD, **fields)
    await crew.bench.submit("good", body=GOOD)
    await crew.bench.submit("engine", body=GOOD)
    await crew.bench.submit("crash", body=json.dumps({"prompt": f"boom {CANARY}"}))
    await crew.bench.submit("overdue", body=GOOD, deadline=await now_ms(crew.bench.redis) - 1)
    await crew.bench.redis.set(crew.bench.keys.cancel("cancelled"), 1, ex=60)
    await crew.bench.submit("cancelled", body=GOOD)
    await crew.bench.submit("labels", body=GOOD, tenant=CANARY, affinity=CANARY, traceparent=CANARY)
    await crew.bench.submit(f"no id {CANARY}", body=GOOD)
    for name in ended:
        await crew.until_ended(name)
    await unwritable(crew)
    await taken_over(crew)
    return ended


async def unwritable(crew: ServiceBench) -> None:
    """A job whose reply's key is of another type."""
    await crew.bench.redis.set(crew.bench.keys.out("unwritable"), "in the way", ex=60)
    await crew.bench.submit("unwritable", body=LONG)

    async def buried() -> bool:
        return len(await crew.bench.letters()) >= 2

    await crew.until_async(buried, "the dead letters of `unwritable` and of the one without an id")


async def taken_over(crew: ServiceBench) -> None:
    """A job that is killed with its worker, released by the second and fenced away from it."""
    await crew.bench.submit("wanderer", body=LONG)
    await crew.published("wanderer", 3)
    await crew.workers[0].kill()
    second = await crew.start(engine=FakeEngine(step_seconds=0.001))
    await crew.published("wanderer", 30)
    await crew.bench.redis.hincrby(crew.bench.keys.job("wanderer"), "epoch", 1)
    await crew.until(lambda: not second.jobs, "the fence")
    await crew.bench.submit("released", body=LONG)
    await crew.published("released", 3)
    second.service.shutdown.signal()
    await second.stop()


@pytest.mark.usefixtures("broken_tokenizer")
async def test_log_lines_hold_nothing_of_a_job_and_name_it(
    crew: ServiceBench, said: Callable[[], str], log_format: str
) -> None:
    await everything(crew)
    text = said()
    assert CANARY not in text.replace(f"no id {CANARY}", ""), [line for line in text.splitlines() if CANARY in line]
    if log_format == "console":
        return
    lines = [json.loads(line) for line in text.splitlines()]
    events = {line["event"] for line in lines}
    vocabulary = {value for name, value in vars(logs).items() if name.isupper() and isinstance(value, str)}
    assert events <= vocabulary
    assert events >= {
        *(logs.JOB_CLAIMED, logs.JOB_STARTED, logs.JOB_RESUMED, logs.JOB_REDELIVERED, logs.JOB_ENDED, logs.JOB_FENCED),
        *(logs.JOB_REJECTED, logs.JOB_FAILED, logs.JOB_RELEASED, logs.DEAD_LETTER),
    }
    about_jobs = [line for line in lines if line["event"].startswith("job_") or "job" in line]
    assert [line for line in about_jobs if not {"job", "epoch", "attempt"} <= set(line)] == []


@pytest.mark.parametrize("log_format", ["json"], indirect=True)
async def test_log_lines_follow_a_job_from_worker_to_worker(crew: ServiceBench, said: Callable[[], str]) -> None:
    first = await crew.start(engine=FakeEngine(step_seconds=0.001))
    await crew.bench.submit("a", body=LONG)
    await crew.published("a", 3)
    await first.kill()
    second = await crew.start(engine=FakeEngine(step_seconds=0.001))
    await crew.published("a", 30)
    await crew.bench.redis.set(crew.bench.keys.cancel("a"), 1, ex=60)
    assert not isinstance((await crew.reply("a")).end, Error)
    await crew.until(lambda: not second.jobs, "the last line")
    lines = [json.loads(line) for line in said().splitlines()]
    told = [(line["event"], line["epoch"], line["attempt"]) for line in lines if line.get("job") == "a"]
    assert told == [
        ("job_claimed", 1, 1),
        ("job_started", 1, 1),
        ("job_redelivered", 2, 2),
        ("job_resumed", 2, 2),
        ("job_cancelled", 2, 2),
        ("job_ended", 2, 2),
    ]
