"""`gllm dead` against real servers, with letters that the claim has written."""

import re

import pytest

from tests.worker.command_bench import Commands, stable
from tests.worker.queue_bench import QueueBench, finish, now_ms, publish
from worker.inspection import letters
from worker.queue import Queue

EVIL = "x\x1b[K\x9b2J\u202e\ny"


@pytest.fixture
async def worker(bench: QueueBench) -> Queue:
    return await bench.worker("w1", lease=20)


async def bury(bench: QueueBench, worker: Queue, *ids: str, **fields: object) -> None:
    """Letters, each with a malformed deadline, in this order."""
    for job_id in ids:
        await bench.submit(job_id, **{"deadline": "soon", "body": '{"prompt":"Hi"}', **fields})
        assert await bench.claimed(worker) == []


# --- ls and show ---


async def test_dead_ls_as_people_see_it(bench: QueueBench, worker: Queue, commands: Commands) -> None:
    assert commands.text("dead", "ls") == "no dead letters\n"
    await bury(bench, worker, "old", tenant=EVIL)
    await bury(bench, worker, "huge", body="x" * (5 << 20))
    await bury(bench, worker, EVIL)
    text = commands("dead", "ls").stdout
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    assert stable(text) == (
        "ENTRY  AGE  JOB  REASON  ATTEMPTS  BODY  ERROR\n"
        "E  T  x␛[K�2J�␊y  malformed  0  15 B  "
        "id: 1 to 128 characters of [A-Za-z0-9._:-] expected, got 'x?[K??2J????y'\n"
        "E  T  huge  too_large  0  5.0 MiB, not kept  body: at most 4194304 bytes expected, got 5242880\n"
        "E  T  old  malformed  0  15 B  deadline: unix milliseconds expected, got 'soon'\n"
    )
    assert commands.text("dead", "ls", "--limit", "1").endswith("… and 2 more\n")
    shown = commands.json("dead", "ls")
    assert (shown["dead"], [letter["id"] for letter in shown["letters"]]) == (3, [EVIL, "huge", "old"])
    assert (shown["letters"][1]["kept"], shown["letters"][1]["body_bytes"]) == (False, 5 << 20)
    assert shown["letters"][2]["labels"] == {"tenant": EVIL}


async def test_dead_show_prints_the_letter_and_the_body(bench: QueueBench, worker: Queue, commands: Commands) -> None:
    await bury(bench, worker, "a", body=f'{{"prompt":"{EVIL}"}}')
    text = commands("dead", "show", "a").stdout
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    lines = stable(text).splitlines()
    assert lines[:4] == [
        "entry  E, T ago", "job  a", "reason  malformed", "error  deadline: unix milliseconds expected, got 'soon'",
    ]  # fmt: skip
    assert lines[-2:] == ['{"prompt":"x␛[K�2J�', 'y"}']
    shown = commands.json("dead", "show", "a")
    assert (shown["id"], shown["body"]) == ("a", f'{{"prompt":"{EVIL}"}}')
    assert commands.json("dead", "show", shown["entry"])["body"] == shown["body"]


async def test_dead_show_reads_any_kind_of_body(bench: QueueBench, worker: Queue, commands: Commands) -> None:
    await bury(bench, worker, "packed", body=b"\x81\xa6prompt\xa2Hi")
    await bury(bench, worker, "binary", body=b"\x00\xff\xc1")
    await bury(bench, worker, "huge", body="x" * (5 << 20))
    assert commands.json("dead", "show", "packed")["body"] == '{"prompt":"Hi"}'
    assert commands.json("dead", "show", "binary")["body"] == "\x00\\xff\\xc1"
    shown = commands.json("dead", "show", "huge")
    assert (shown["body"], len(shown["labels"]["body_sha1"])) == (None, 40)
    assert commands.text("dead", "show", "huge").splitlines()[-1] == "body  5.0 MiB, not kept"


async def test_dead_show_takes_the_newest_letter_of_an_id(bench: QueueBench, worker: Queue, commands: Commands) -> None:
    await bury(bench, worker, "a")
    await bench.redis.delete(bench.keys.job("a"), bench.keys.out("a"))
    await bury(bench, worker, "a", deadline="never")
    assert commands.json("dead", "show", "a")["error"].endswith("'never'")
    first, second = commands.json("dead", "ls")["letters"]
    assert commands.json("dead", "show", second["entry"])["error"].endswith("'soon'")
    assert commands.json("dead", "show", first["entry"])["error"].endswith("'never'")


@pytest.mark.parametrize("command", [["show"], ["retry"], ["purge", "--yes"]])
def test_dead_commands_refuse_a_name_that_nobody_knows(commands: Commands, command: list[str]) -> None:
    result = commands("dead", *command, f"a{EVIL}")
    queue = commands.environment["GLLM_QUEUE"]
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: no dead letter ax␛[K�2J�␊y in queue {queue}\n"
    for entry in ("1-1", "99999999999999999999-0"):
        assert commands("dead", *command, entry).stderr == f"Error: no dead letter {entry} in queue {queue}\n"


# --- retry ---


async def test_dead_retry_gives_a_job_another_life(bench: QueueBench, worker: Queue, commands: Commands) -> None:
    await bury(bench, worker, "a", "b", tenant="t")
    entry = commands.json("dead", "ls")["letters"][0]["entry"]
    assert commands.text("dead", "retry", "a") == "a: added to jobs:normal:0 as E\n"
    (row,) = commands.json("dead", "retry", entry)
    assert (row["id"], row["error"]) == ("b", None)
    jobs = await bench.claimed(worker)
    assert [(job.id, job.tenant, job.entry) for job in jobs][1] == ("b", "t", row["added"])
    await publish(worker, jobs[0], 0, 2)
    assert (await finish(worker, jobs[0], 2)).status == "OK"
    assert commands.json("dead", "ls")["dead"] == 0
    assert commands.json("show", "a")["reply"]["tokens"] == 2


async def test_dead_retry_says_what_cannot_be_retried(bench: QueueBench, worker: Queue, commands: Commands) -> None:
    await bury(bench, worker, "huge", body="x" * (5 << 20))
    await bury(bench, worker, "a b", "good", "i" * 129)
    await bench.redis.xadd(bench.keys.dead, {"reason": "foreign"})
    result = commands("dead", "retry", "--all")
    assert result.exit_code == 1
    assert stable(result.stdout) == "good: added to jobs:normal:0 as E\n1 job added again, 4 could not be\n"
    nobody = "it holds no job that could be added again: no usable id, no body, or a stream that no worker looks at"
    assert stable(result.stderr).splitlines() == [
        "Error: E (huge): its body of 5.0 MiB was too large to keep; submit it anew",
        f"Error: E (a b): {nobody}",
        f"Error: E ({'i' * 129}): {nobody}",
        f"Error: E (without an id): {nobody}",
    ]
    assert [job.id for job in await bench.claimed(worker)] == ["good"]
    rows = commands.json("dead", "retry", "huge", status=1)
    assert (rows[0]["added"], rows[0]["error"].endswith("submit it anew")) == (None, True)


@pytest.mark.parametrize("stream", ["jobs:normal:1", "jobs:urgent:0", "jobs:normal:", "meta", ""])
async def test_dead_retry_adds_no_job_where_no_worker_looks(
    bench: QueueBench, worker: Queue, commands: Commands, stream: str
) -> None:
    letter = {"id": "a", "reason": "max_attempts", "stream": stream, "body": "{}"}
    await bench.redis.xadd(bench.keys.dead, letter)
    assert "a stream that no worker looks at" in commands("dead", "retry", "a").stderr
    assert await bench.letters() == [{name.encode(): value.encode() for name, value in letter.items()}]


async def test_dead_retry_leaves_a_job_alone_that_lives_again(
    bench: QueueBench, worker: Queue, commands: Commands
) -> None:
    await bury(bench, worker, "a")
    await bench.redis.delete(bench.keys.job("a"), bench.keys.out("a"))
    job = await bench.one(worker, "a")
    await publish(worker, job, 0, 2)
    result = commands("dead", "retry", "a")
    assert (result.exit_code, stable(result.stderr)) == (1, "Error: E (a): a job with this id runs or waits again\n")
    assert (await publish(worker, job, 2, 3)).status == "OK"
    assert (await finish(worker, job, 3)).status == "OK"
    assert commands("dead", "retry", "a").exit_code == 0
    assert [job.id for job in await bench.claimed(worker)] == ["a"]


async def test_dead_retry_heals_a_record_of_another_type(bench: QueueBench, worker: Queue, commands: Commands) -> None:
    await bench.redis.set(bench.keys.job("a"), 1, ex=60)
    await bench.submit("a")
    assert await bench.claimed(worker) == []
    assert commands("dead", "retry", "a").exit_code == 0
    assert [job.id for job in await bench.claimed(worker)] == ["a"]


# --- purge ---


async def test_dead_purge_by_name_by_age_and_all(bench: QueueBench, worker: Queue, commands: Commands) -> None:
    old = await now_ms(bench.redis) - 3_600_000
    await bench.redis.xadd(bench.keys.dead, {"id": "old", "reason": "x"}, id=f"{old}-0")
    await bury(bench, worker, "a", "b", "c")
    assert commands.text("dead", "purge", "a", "--yes") == "1 dead letter deleted\n"
    assert commands.json("dead", "purge", "--older-than", "2h", "--yes") == {"purged": 0}
    assert commands.json("dead", "purge", "--older-than", "59m", "--yes") == {"purged": 1}
    assert [letter["id"] for letter in commands.json("dead", "ls")["letters"]] == ["c", "b"]
    assert commands.text("dead", "purge", "--all", "--yes") == "2 dead letters deleted\n"
    assert commands.text("dead", "purge", "--all", "--yes") == "0 dead letters deleted\n"


async def test_dead_commands_say_what_a_look_did_not_reach(
    bench: QueueBench, worker: Queue, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letters, "MAX_LETTERS", 2)
    await bury(bench, worker, "a", "b", "c", "d", "e")
    said = commands.text("dead", "retry", "--all")
    assert said.endswith("2 jobs added again, 0 could not be; 3 left: do it again\n")
    assert commands.text("dead", "purge", "--all", "--yes") == "2 dead letters deleted; 1 left: do it again\n"
    assert commands.text("dead", "purge", "--all", "--yes") == "1 dead letter deleted\n"


async def test_dead_purge_asks_first(
    bench: QueueBench, worker: Queue, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bury(bench, worker, "a")
    result = commands("dead", "purge", "--all")
    assert result.exit_code == 2, "there is nobody to ask"
    question = f"delete 1 dead letter of queue {bench.keys.queue} for good?"
    assert question in result.stderr
    assert "--yes" in result.stderr
    monkeypatch.setattr("worker.commands.dead.at_a_terminal", lambda: True)
    result = commands("dead", "purge", "--all", input="n\n")
    assert (result.exit_code, result.stderr) == (1, f"{question} [y/N]: n\nAborted!\n")
    assert commands.json("dead", "ls")["dead"] == 1
    assert commands("dead", "purge", "--all", input="y\n").exit_code == 0
    assert commands.json("dead", "ls")["dead"] == 0


@pytest.mark.parametrize("more", [[], ["a", "--all"], ["--all", "--older-than", "1d"]])
def test_dead_purge_wants_exactly_one_choice(commands: Commands, more: list[str]) -> None:
    result = commands("dead", "purge", *more)
    assert result.exit_code == 2
    assert "exactly one expected of NAME... and --all, --older-than" in result.stderr
    assert "exactly one expected of NAME... and --all\n" in commands("dead", "retry").stderr


@pytest.mark.parametrize("age", ["1", "d", "-1d", "1w", "1 d", "9999999999d"])
def test_dead_purge_refuses_what_is_no_age(commands: Commands, age: str) -> None:
    result = commands("dead", "purge", "--older-than", age)
    assert result.exit_code == 2
    assert re.search(r"a time like 30s, 15m, 12h or 7d expected, got", result.stderr)


async def test_dead_letters_beyond_a_page_are_all_there(bench: QueueBench, commands: Commands) -> None:
    pipeline = bench.redis.pipeline(transaction=False)
    for number in range(300):  # and more than 16 MiB in the first 250, where a page ends early
        pipeline.xadd(bench.keys.dead, {"id": f"job{number}", "reason": "x", "body": "y" * 70_000})
    await pipeline.execute()
    shown = commands.json("dead", "ls", "--limit", "299")
    assert [letter["id"] for letter in shown["letters"]] == [f"job{number}" for number in range(299, 0, -1)]
    assert commands.json("dead", "show", "job0")["body_bytes"] == 70_000
    assert commands.json("dead", "purge", "--all", "--yes") == {"purged": 300}
