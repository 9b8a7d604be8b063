"""`gllm show` against real servers: every state that a job can be in."""

import json
import re

import pytest

from gllm.connection import connect_sync
from gllm.protocol import TERMINAL_ENTRY_ID
from tests.gllm.scribe import Scribe
from tests.worker.command_bench import Commands, stable
from tests.worker.fake_engine import FakeEngine
from tests.worker.queue_bench import QueueBench, now_ms, publish
from tests.worker.service_bench import ServiceBench

EVIL = "x\x1b[31m\x9b2J\u202e\ny"


async def test_show_a_job_from_a_real_worker(crew: ServiceBench, commands: Commands) -> None:
    await crew.start(engine=FakeEngine(tokens_per_step=3))
    await crew.submit("a", max_tokens=8, entry={"tenant": EVIL})
    reply = await crew.reply("a")
    text = commands.text("show", "a")
    assert text.splitlines()[:4] == ["job  a", "state  ended", "submitted  T ago", "entry  E in jobs:normal:0"]
    assert "record  epoch 2, 1 claim, 0 workers died with it, 8 tokens; kept for T" in text
    assert re.search(r"^reply  8 tokens, 8 characters in \d entries; kept for T$", text, re.MULTILINE)
    assert re.search(r"^start  by \S+, attempt 1, 5 prompt tokens, 2 cached$", text, re.MULTILINE)
    assert "end  length, 8 tokens; waited T, first token T, total T" in text
    assert commands("show", "a", "--text").stdout == reply.text + "\n"
    shown = commands.json("show", "a")
    assert (shown["state"], shown["record"]["tokens"], shown["reply"]["end"]["finish_reason"]) == ("ended", 8, "length")
    assert "text" not in shown["reply"]
    assert "events" not in shown["reply"]
    shown = json.loads(commands("show", "a", "--json", "--text", "--events").stdout)
    assert shown["reply"]["text"] == reply.text
    assert [row["event"]["type"] for row in shown["reply"]["events"]][::6] == ["start"]
    assert shown["reply"]["events"][-1]["event"]["usage"]["completion_tokens"] == 8


async def test_show_jobs_that_run_are_orphaned_or_were_released(bench: QueueBench, commands: Commands) -> None:
    worker = await bench.worker("w1", lease=20)
    job = await bench.one(worker, tenant=EVIL, deadline=await now_ms(bench.redis) + 10_000)
    await publish(worker, job, 0, 3)
    shown = commands.json("show", "a")
    assert (shown["state"], shown["holder"]["consumer"], shown["record"]["tokens"]) == ("running", "w1", 3)
    assert (shown["labels"]["tenant"], shown["body_bytes"], shown["place"]) == (EVIL, 2, None)
    text = stable(commands("show", "a").stdout)
    assert text.splitlines()[1] == "state  running by w1, renewed T ago"
    assert re.search(r"^deadline  \d{13}, in T$", text, re.MULTILINE)
    await bench.redis.zadd(bench.keys.workers, {"w1": 1})
    assert commands.json("show", "a")["state"] == "orphaned"
    await bench.submit("b", v=1)
    await bench.redis.zadd(bench.keys.workers, {"w1": await now_ms(bench.redis)})
    await worker.release([job])
    shown = commands.json("show", "a")
    assert (shown["state"], shown["place"]) == ("released", {"stream": "jobs:normal:0", "ahead": 0, "waiting": 2})
    shown = commands.json("show", "b")
    assert (shown["state"], shown["place"]["ahead"], shown["record"]) == ("waiting", 1, None), "released ones go first"
    text = commands.text("show", "b")
    assert "place  2 of 2 that wait in jobs:normal:0" in text
    assert "\nv  " not in text


async def test_show_a_delayed_job_before_and_after_its_time(bench: QueueBench, commands: Commands) -> None:
    worker = await bench.worker("w1", lease=20)
    await bench.submit("later", "low", body='{"x":1}', not_before=await now_ms(bench.redis) + 3_600_000, tenant="t")
    await bench.claimed(worker)
    await bench.redis.set(bench.keys.cancel("later"), 1, ex=60)
    shown = commands.json("show", "later")
    assert (shown["state"], shown["cancelling"], shown["body_bytes"], shown["labels"]["tenant"]) == (
        "delayed", True, 7, "t",
    )  # fmt: skip
    assert 3_590_000 < shown["due_in_ms"] <= 3_600_000
    assert "due  in T\n" in commands.text("show", "later")
    assert "cancel  asked for\n" in commands.text("show", "later")
    await bench.redis.zadd(bench.keys.delayed, {"later": 1})
    await worker.claim(0, ())  # promotes it
    shown = commands.json("show", "later")
    assert (shown["state"], shown["place"]["ahead"], shown["due_in_ms"]) == ("waiting", 0, None)


async def test_show_place_ends_where_nobody_has_looked(bench: QueueBench, commands: Commands) -> None:
    pipeline = bench.redis.pipeline(transaction=False)
    for number in range(1002):
        pipeline.xadd(bench.keys.jobs("low", 0), {"id": f"job{number}", "body": "{}"})
    *_, last = await pipeline.execute()
    assert commands.json("show", "job999")["place"]["ahead"] == 999
    result = commands("show", "job1001")
    looked = "of those that wait, the first 1,000 of each priority were looked at"
    assert (result.exit_code, result.stderr) == (
        1, f"Error: queue {bench.keys.queue} knows no job job1001 ({looked})\n",
    )  # fmt: skip
    record = {"entry": f"jobs:low:0|{last.decode()}", "epoch": 1}
    await bench.redis.hset(bench.keys.job("job1001"), mapping=record)
    await bench.redis.expire(bench.keys.job("job1001"), 60)
    assert "place  far behind: one of 1,002 jobs that wait in jobs:low:0" in commands.text("show", "job1001")


async def test_show_finds_a_held_job_whose_record_is_lost(bench: QueueBench, commands: Commands) -> None:
    await bench.one(await bench.worker("w1", lease=20))
    await bench.redis.delete(bench.keys.job("a"))
    shown = commands.json("show", "a")
    assert (shown["state"], shown["record"], shown["holder"]["consumer"]) == ("running", None, "w1")


async def test_show_an_unknown_id_is_a_clear_error(commands: Commands) -> None:
    queue = commands.environment["GLLM_QUEUE"]
    result = commands("show", "nobody", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"Error: queue {queue} knows no job nobody\n")
    result = commands("show", f"{EVIL}")
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: id: 1 to 128 characters of .* expected, got .*\n", result.stderr)
    assert result.stderr[:-1].isprintable()


async def test_show_a_job_that_died_and_its_letter(bench: QueueBench, commands: Commands) -> None:
    await bench.submit("bad", deadline=EVIL)
    await bench.claimed(await bench.worker("w1", lease=20))
    shown = commands.json("show", "bad")
    assert (shown["state"], shown["letters"][0]["reason"], shown["reply"]["end"]["code"]) == (
        "ended", "malformed", "invalid",
    )  # fmt: skip
    text = commands.text("show", "bad")
    assert re.search(r"^end  invalid: deadline: ", text, re.MULTILINE)
    assert re.search(r"^dead  malformed: deadline: .* \(gllm dead show E\)$", text, re.MULTILINE)
    await bench.redis.delete(bench.keys.job("bad"), bench.keys.out("bad"))
    assert commands.json("show", "bad")["state"] == "unknown"
    assert commands("show", "bad", "--text").stdout == "\n"


def test_show_events_one_by_one_whatever_they_hold(redis_url: str, commands: Commands, keys) -> None:
    with connect_sync(redis_url) as server:
        scribe = Scribe(server, keys, "a")
        scribe.start()
        scribe.tokens(0, 0, [1, 2], f"He{EVIL}")
        scribe.resume(2, 4, exact=False)
        scribe.done(2, "!")
    text = commands("show", "a", "--events").stdout
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    assert text[text.index("ENTRY") :].splitlines() == [
        "ENTRY               EVENT   WHAT",
        "0-1                 start   attempt 1, 5 prompt tokens, 0 cached",
        "2-0                 tokens  2 tokens from 0: 'Hex\\x1b[31m\\x9b2J\\u202e\\ny'",
        "2-4                 resume  attempt 2, from token 2, not exact",
        "9007199254740991-0  done    stop, 2 tokens; waited 0ms, total 0ms",
    ]
    assert "resume  by w2, attempt 2, from token 2, not exact" in stable(text)
    assert commands("show", "a", "--text").stdout == f"He{EVIL}!\n", "a pipe gets the text as it is"


def test_show_says_what_no_client_could_read(redis_url: str, commands: Commands, keys) -> None:
    with connect_sync(redis_url) as server:
        scribe = Scribe(server, keys, "hole")
        scribe.start()
        scribe.tokens(4, 4, [5], "x")
        foreign = Scribe(server, keys, "foreign")
        foreign.start()
        server.xadd(foreign.out, {"e\x1b": b"\xff\x9b"}, id="3-0")
        foreign.done(0)
        server.set(keys.job("wrong"), 1, ex=60)
        server.set(keys.out("wrong"), 1, ex=60)
    assert "problem  Hole: entry 5-0: tokens 0 to 4 of the reply are missing" in commands.text("show", "hole")
    shown = commands.json("show", "foreign", "--events")
    assert shown["reply"]["problem"].startswith("entry 3-0: no reply event of protocol version 1")
    assert shown["reply"]["events"][1]["raw"] == r"{'e\x1b': '\\xff\\x9b'}"
    assert shown["state"] == "ended"
    assert commands.text("show", "foreign", "--events").count(TERMINAL_ENTRY_ID) == 1
    shown = commands.json("show", "wrong")
    assert (shown["state"], shown["reply"]) == ("unknown", None)
    assert "WRONGTYPE" in shown["problems"][0]


@pytest.mark.parametrize("flag", ["--text", "--events"])
def test_show_reads_a_long_reply_in_pages(redis_url: str, commands: Commands, keys, flag: str) -> None:
    with connect_sync(redis_url) as server:
        scribe = Scribe(server, keys, "a")
        scribe.start()
        for number in range(300):
            scribe.tokens(number, number, [number], "x")
    shown = commands.json("show", "a", flag)["reply"]
    assert (shown["tokens"], shown["characters"], shown["entries"], shown["end"]) == (300, 300, 301, None)
    assert len(shown[flag.removeprefix("--")]) in (300, 301)
