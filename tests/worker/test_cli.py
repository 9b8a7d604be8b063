"""The commands as people type them, against real servers; the worker's side of a reply is written by hand."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import redis as redis_sync
from click.testing import CliRunner, Result

from gllm.connection import connect_sync
from gllm.keys import Keys
from gllm.protocol import TERMINAL_ENTRY_ID
from tests.gllm.scribe import Scribe
from worker.cli import main

NOWHERE = "redis://127.0.0.1:1/0"
Gllm = Callable[..., Result]


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GLLM_")]:
        monkeypatch.delenv(name)


def gllm(*arguments: str, **more) -> Result:
    return CliRunner().invoke(main, list(arguments), **more)


@pytest.fixture
def on_queue(redis_url: str, keys: Keys) -> Gllm:
    """Runs a command against the test's own queue."""
    return lambda *arguments, **more: gllm(
        *arguments, env={"GLLM_REDIS_URL": redis_url, "GLLM_QUEUE": keys.queue}, **more
    )


@pytest.fixture
def server(redis_url: str):
    with connect_sync(redis_url) as client:
        yield client


def entry_of(server: redis_sync.Redis, keys: Keys, priority: str = "normal") -> dict[str, str]:
    [(_, fields)] = server.xrange(keys.jobs(priority, 0))
    return {name.decode(): value.decode() for name, value in fields.items()}


def test_help_says_what_each_command_does_on_a_narrow_terminal() -> None:
    usage, *lines = gllm("--help", env={"COLUMNS": "80"}).stdout.splitlines()
    assert usage.startswith("Usage: ")
    assert [line for line in lines if line.endswith("...")] == []


# --- submit ---


def test_cli_submit_streams_the_reply(on_queue: Gllm, server: redis_sync.Redis, keys: Keys) -> None:
    Scribe(server, keys, "job1").hello()
    result = on_queue("submit", "Once upon", "--id", "job1", "--max-tokens", "64")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello world\n", "job job1\n")
    assert json.loads(entry_of(server, keys)["body"]) == {"prompt": "Once upon", "max_tokens": 64}


def test_cli_submit_says_every_field_of_a_job(on_queue: Gllm, server: redis_sync.Redis, keys: Keys) -> None:
    sampling = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "4", "--seed", "7", "--stop", "a", "--stop", "b"]
    routing = ["--priority", "high", "--affinity", "f", "--tenant", "t"]
    more = ["--set", "min_p=0.1", "--set", 'metadata={"a":1}']
    result = on_queue("submit", "--chat", "--system", "Be kind.", "Hi", "--detach", *sampling, *routing, *more)
    fields = entry_of(server, keys, "high")
    assert (result.exit_code, result.stdout) == (0, fields["id"] + "\n")
    assert (fields["affinity"], fields["tenant"], fields["v"]) == ("f", "t", "1")
    assert json.loads(fields["body"]) == {
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 7,
        "stop": ["a", "b"],
        "min_p": 0.1,
        "metadata": {"a": 1},
    }


def test_cli_submit_reads_standard_input(on_queue: Gllm, server: redis_sync.Redis, keys: Keys) -> None:
    assert on_queue("submit", "-", "--detach", input="füße\n").exit_code == 0
    assert json.loads(entry_of(server, keys)["body"]) == {"prompt": "füße\n"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--top-p", "7"], r"top_p: .*got 7.0"),
        (["x", "--set", "speed=9"], "speed: unknown field, got 9"),
        (["x", "--set", "id=9"], "id: unknown field, got 9"),
        (["x", "--set", "speed"], "--set: NAME=JSON expected, got 'speed'"),
        ([], "PROMPT expected: a text, or - for standard input"),
        (["x", "--set", "token_ids=[1]"], "got prompt and token_ids"),
        (["x", "--id", "a b"], 'id: .*got "a b"'),
        (["x", "--priority", "urgent"], "priority: one of high, normal, low"),
        (["x", "--queue", "a b"], "--queue: .*got 'a b'"),
        (["x", "--redis", "http://h"], "--redis: .*got 'http://h'"),
        (["-"], "standard input is no UTF-8"),
    ],
)
def test_cli_submit_refuses_in_one_line(
    on_queue: Gllm, server: redis_sync.Redis, keys: Keys, arguments: list[str], message: str
) -> None:
    result = on_queue("submit", *arguments, input=b"\xff")
    assert result.exit_code in (1, 2)
    assert re.search(message, result.stderr.splitlines()[-1]), result.stderr
    assert "Traceback" not in result.stderr
    assert server.keys(keys.base + "*") == []


def test_cli_submit_ends_with_1_for_a_job_that_failed(on_queue: Gllm, server: redis_sync.Redis, keys: Keys) -> None:
    Scribe(server, keys, "job1").error("too_large", "9000 tokens")
    result = on_queue("submit", "x", "--id", "job1")
    assert (result.exit_code, result.stdout) == (1, "\n")
    assert result.stderr.splitlines()[-1] == "Error: job job1: too_large: 9000 tokens"


def test_cli_submit_ends_with_1_for_a_cancelled_job(on_queue: Gllm, server: redis_sync.Redis, keys: Keys) -> None:
    Scribe(server, keys, "job1").done(0, reason="cancelled")
    result = on_queue("submit", "x", "--id", "job1")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "Error: job job1: cancelled")


# --- tail and cancel ---


def test_cli_tail_writes_what_the_encoding_of_the_terminal_has_not(
    redis_url: str, server: redis_sync.Redis, keys: Keys
) -> None:
    scribe = Scribe(server, keys, "job1")
    scribe.tokens(0, 0, [1], "é🙂")
    scribe.done(1)
    command = [sys.executable, "-m", "worker.cli", "tail", "job1", "--redis", redis_url, "--queue", keys.queue]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False)
    assert (done.stdout, done.returncode) == (b"\xe9\\U0001f642\n", 0)


def test_cli_tail_goes_on_behind_an_entry(on_queue: Gllm, server: redis_sync.Redis, keys: Keys) -> None:
    Scribe(server, keys, "job1").hello()
    assert on_queue("tail", "job1").stdout == "Hello world\n"
    assert on_queue("tail", "job1", "--from", "1-0").stdout == "lo world\n"
    result = on_queue("tail", "job1", "--from", TERMINAL_ENTRY_ID)
    assert (result.stdout, result.exit_code) == ("\n", 0)


def test_cli_tail_writes_events_for_programs(on_queue: Gllm, server: redis_sync.Redis, keys: Keys) -> None:
    Scribe(server, keys, "job1").hello()
    lines = [json.loads(line) for line in on_queue("tail", "job1", "--json").stdout.splitlines()]
    assert [line["entry"] for line in lines] == ["0-1", "1-0", "3-0", TERMINAL_ENTRY_ID]
    assert [line["event"]["type"] for line in lines] == ["start", "tokens", "tokens", "done"]


def test_cli_tail_refuses_what_is_no_entry_and_says_when_a_reply_is_gone(
    on_queue: Gllm, server: redis_sync.Redis, keys: Keys
) -> None:
    assert "last_id: an entry id like 12-0 expected, got 'x'" in on_queue("tail", "job1", "--from", "x").stderr
    Scribe(server, keys, "job1").state("ended")
    result = on_queue("tail", "job1")
    assert (result.exit_code, result.stderr) == (
        1,
        "Error: job job1 has ended and its reply is no longer kept\n",
    )


def test_cli_cancel_tells_for_each_job(on_queue: Gllm, server: redis_sync.Redis, keys: Keys) -> None:
    Scribe(server, keys, "old").hello()
    Scribe(server, keys, "new").start()
    result = on_queue("cancel", "new", "old")
    assert (result.exit_code, result.stdout) == (1, "new: cancelling\nold: had ended already\n")
    assert server.exists(keys.cancel("new"), keys.cancel("old")) == 1
    assert on_queue("cancel", "new").exit_code == 0
    assert json.loads(on_queue("cancel", "new", "--json").stdout) == [{"id": "new", "cancelling": True}]


# --- what all commands share ---


@pytest.mark.parametrize("arguments", [["submit", "x"], ["tail", "job1"], ["cancel", "job1"]])
def test_cli_says_in_one_line_that_redis_is_not_there(arguments: list[str]) -> None:
    result = gllm(*arguments, "--redis", NOWHERE.replace("redis://", "redis://:secret@"))
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: Redis at redis://:\*\*\*@127\.0\.0\.1:1/0: .*refused.*\n", result.stderr)


def test_cli_producers_are_not_disturbed_by_a_workers_variables(on_queue: Gllm) -> None:
    assert on_queue("submit", "x", "--detach", color=False).exit_code == 0
    result = gllm("cancel", "x", "--redis", NOWHERE, env={"GLLM_BLOCK_SIZE": "many"})
    assert "refused" in result.stderr


def test_cli_interrupted_stream_says_how_to_read_on(redis_url: str, keys: Keys, server: redis_sync.Redis) -> None:
    scribe = Scribe(server, keys, "job1")
    scribe.start()
    scribe.tokens(0, 0, [1], "Hel")
    command = [sys.executable, "-m", "worker.cli", "tail", "job1", "--redis", redis_url, "--queue", keys.queue]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(3) == "Hel"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "\ninterrupted; the job goes on. Read on: gllm tail job1 --from 1-0\n"


def test_cli_streams_while_the_reply_is_written(redis_url: str, keys: Keys, server: redis_sync.Redis) -> None:
    scribe = Scribe(server, keys, "job1")
    command = [sys.executable, "-m", "worker.cli", "tail", "job1", "--redis", redis_url, "--queue", keys.queue]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    watchdog = threading.Timer(30, process.kill)
    watchdog.start()
    for number, letter in enumerate("abc"):
        scribe.tokens(number, number, [number], letter)
        assert process.stdout.read(1) == letter
    scribe.done(3)
    assert process.wait(20) == 0
    watchdog.cancel()
    process.stdout.close()


def test_cli_help_and_version_need_nothing() -> None:
    result = gllm("--help")
    assert {"worker", "demo", "submit", "tail", "cancel"} <= set(result.stdout.split())
    assert gllm("--version").stdout.startswith("gllm, version 0.")
    assert gllm("wroker").exit_code == 2


def test_cli_help_loads_no_heavy_library() -> None:
    script = """
import sys
from worker.cli import main
try: main(["worker", "--help"])
except SystemExit: print(*sys.modules)
"""
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "redis", "structlog", "tokenizers", "rich", "prometheus_client", "asyncio"} & set(loaded)


# --- worker ---


def test_cli_worker_help_names_every_setting() -> None:
    text = gllm("worker", "--help").stdout
    asked = "model redis queue device dtype prefix-cache no-prefix-cache deterministic block-size kv-blocks kv-memory"
    more = "max-sequences max-step-tokens max-model-len metrics-port log-format lease grace print-config"
    for name in f"{asked} {more}".split():
        assert f"--{name}" in text
    assert "GLLM_MAX_STEP_TOKENS" in text


def test_cli_worker_prints_its_settings_and_starts_nothing() -> None:
    flags = ["--lease", "0.5", "--no-prefix-cache", "--deterministic", "--kv-memory", "2GiB"]
    result = gllm("worker", "--print-config", *flags, env={"GLLM_PREFIX_CACHE": "1", "GLLM_REDIS_URL": "redis://h/0"})
    shown = {
        name: rest.split("  # ") for name, _, rest in (line.partition(" = ") for line in result.stdout.splitlines())
    }
    stripped = {name: (value.strip(), source) for name, (value, source) in shown.items()}
    assert result.exit_code == 0
    assert stripped["lease"] == ("0.5", "flag --lease")
    assert stripped["prefix_cache"] == ("false", "flag --no-prefix-cache")
    assert stripped["deterministic"] == ("true", "flag --deterministic")
    assert stripped["kv_memory"] == ("2147483648", "flag --kv-memory")
    assert stripped["redis"] == ('"redis://h/0"', "environment GLLM_REDIS_URL")
    assert stripped["queue"] == ('"default"', "default")


@pytest.mark.parametrize("value", ["auto", "false", "true"])
def test_cli_worker_takes_deterministic_with_a_value(value: str) -> None:
    result = gllm("worker", "--deterministic", value, "--print-config")
    wanted = '"auto"' if value == "auto" else value
    assert re.search(rf"^deterministic = {wanted} +# flag --deterministic$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--block-size", "0"], {}, "Error: --block-size: an integer from 1 to 4096 expected, got '0'\n"),
        ([], {"GLLM_LEASE": "soon"}, "Error: GLLM_LEASE: seconds, at least 0.05, expected, got 'soon'\n"),
    ],
)
def test_cli_worker_refuses_a_setting_in_one_line(arguments: list[str], environment: dict, message: str) -> None:
    result = gllm("worker", *arguments, env=environment)
    assert (result.exit_code, result.stderr) == (2, message)


def test_cli_worker_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name in ("torch", "tokenizers") else found(name))
    for command in ("worker", "demo"):
        result = gllm(command)
        assert result.exit_code == 1
        assert result.stderr == f"Error: gllm {command} needs torch, tokenizers: pip install 'gllm[worker]'\n"
