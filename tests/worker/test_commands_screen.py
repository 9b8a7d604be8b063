"""What all commands of people share: the terminal, --watch, one line for an error, every character for a pipe."""

import json
import os
import pty
import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.gllm.scribe import Scribe
from tests.servers import Server, first_kind
from tests.worker.command_bench import Commands, stable
from worker.commands.dead import dead_group
from worker.inspection.records import JobState, WorkerState


@pytest.fixture
def one_server(shared_servers: Callable[[str], Server]) -> str:
    """One kind of server is enough for what happens on this side of it."""
    return shared_servers(first_kind()).url


def read_until(terminal: int, wanted: bytes, seconds: float = 20) -> bytes:
    """What a terminal shows, up to the wanted text."""
    seen, end = b"", time.monotonic() + seconds
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
        assert ready, seen
        seen += os.read(terminal, 65536)
    return seen


def test_ps_on_a_terminal_is_coloured_redrawn_and_ends_with_ctrl_c(one_server: str, queue_name: str) -> None:
    commands, (ours, theirs) = Commands(one_server, Keys(queue_name)), pty.openpty()
    process = commands.process("ps", "--watch", "0.1", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = read_until(ours, b"no workers")
    assert seen.startswith(b"\x1b[2J")
    assert b"\x1b[31mno workers" in seen
    seen = read_until(ours, b"no workers") + read_until(ours, b"no workers")
    assert b"\x1b[H" in seen, "drawn over what was there"
    process.send_signal(signal.SIGINT)
    assert read_until(ours, b"\x1b[?25h"), "the cursor is back"
    assert process.wait(20) == 0
    os.close(ours)


def test_queue_watched_by_a_program_survives_a_lost_redis(own_server: Server, queue_name: str) -> None:
    commands = Commands(own_server.url, Keys(queue_name))
    process = commands.process("queue", "--watch", "0.1", "--json", stdout=-1, stderr=-1)
    assert process.stdout is not None
    assert process.stderr is not None
    assert b'"dead":0' in process.stdout.readline()
    own_server.stop(kill=True)
    assert process.stderr.readline().startswith(b"Redis: ")
    own_server.start()
    with connect_sync(own_server.url) as server:
        server.xadd(commands.keys.dead, {"id": "job1"})
    assert any(json.loads(line)["dead"] == 1 for line in iter(process.stdout.readline, b"")), "JSON, always"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.parametrize("command", [("ps", "--watch", "0.1"), ("top", "--interval", "0.1")])
def test_dumb_terminal_gets_page_after_page_and_no_command(
    one_server: str, queue_name: str, command: tuple[str, ...]
) -> None:
    commands, (ours, theirs) = Commands(one_server, Keys(queue_name)), pty.openpty()
    dumb = {"environment": {"TERM": "dumb"}}
    process = commands.process(*command, stdin=theirs, stdout=theirs, stderr=theirs, **dumb)
    os.close(theirs)
    seen = read_until(ours, b"workers") + read_until(ours, b"workers")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert b"\x1b" not in seen
    os.close(ours)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_full_disk_is_a_line_and_no_traceback(one_server: str, queue_name: str) -> None:
    with open("/dev/full", "wb") as full:
        process = Commands(one_server, Keys(queue_name)).process("queue", stdout=full, stderr=-1)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (1, b"Error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("command", [("ps", "--watch", "inf"), ("top", "--interval", "nan"), ("queue", "--watch", "0")])
def test_pause_that_no_clock_can_make_is_refused(one_server: str, queue_name: str, command: tuple[str, ...]) -> None:
    result = Commands(one_server, Keys(queue_name))(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert command[2] in result.stderr


def test_commands_work_where_nothing_but_ascii_is_known(one_server: str, queue_name: str) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    commands = Commands(one_server, Keys(queue_name))
    process = commands.process("queue", stdout=-1, stderr=-1, environment=ascii_only)
    lines, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, b"")
    assert lines.startswith(b"PRIORITY")


def test_show_watched_follows_a_job_to_its_end(one_server: str, queue_name: str) -> None:
    commands = Commands(one_server, Keys(queue_name))
    with connect_sync(one_server) as server:
        scribe = Scribe(server, commands.keys, "job1")
        scribe.start()
        scribe.tokens(0, 0, [1], "a")
        process = commands.process("show", "job1", "--watch", "0.1", "--json", "--text", stdout=-1, stderr=-1)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["reply"]["text"] == "a"
        scribe.tokens(1, 1, [2], "b")
        scribe.done(2, "c")
        looks = (json.loads(line) for line in iter(process.stdout.readline, b""))
        last = next(look for look in looks if look["state"] == "ended" and look["reply"]["end"])
    assert last["reply"]["text"] == "abc"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, b"")


def test_show_watched_gives_a_pipe_every_character(one_server: str, queue_name: str) -> None:
    commands = Commands(one_server, Keys(queue_name))
    with connect_sync(one_server) as server:
        Scribe(server, commands.keys, "job1").tokens(0, 0, [1], "\x1b[31mred")
    process = commands.process("show", "job1", "--watch", "0.1", "--text", stdout=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\x1b[31mred\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.parametrize(
    "command", [["ps"], ["queue"], ["show", "x"], ["dead", "ls"], ["dead", "retry", "x"], ["doctor"]]
)
def test_look_says_in_one_line_that_redis_is_not_there(command: list[str], queue_name: str) -> None:
    result = Commands("redis://:secret@127.0.0.1:1/0", Keys(queue_name))(*command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"Error: Redis at redis://:\*\*\*@127\.0\.0\.1:1/0: .*refused.*\n", result.stderr)


def test_look_says_in_one_line_what_redis_refuses(own_server: Server, queue_name: str) -> None:
    with connect_sync(own_server.url) as server:
        server.config_set("requirepass", "secret")
    for command in ("ps", "queue", "doctor"):
        result = Commands(own_server.url, Keys(queue_name))(command)
        assert re.fullmatch(r"Error: Redis at .*[Aa]uthentication required.*\n", result.stderr), result.output
        assert (result.exit_code, result.stdout) == (1, "")


def test_stable_hides_what_differs() -> None:
    assert stable("1796010637364-0  4.2s  3m20s 2h5m 850ms 1,204 v1 59m") == "E  T  T T T 1,204 v1 T"


def test_tail_gives_a_pipe_every_character(redis_url: str, keys: Keys, commands: Commands) -> None:
    with connect_sync(redis_url) as server:
        scribe = Scribe(server, keys, "job1")
        scribe.tokens(0, 0, [1], "\x1b[31mred")
        scribe.error("internal", "\x1b[2J")
    result = commands("tail", "job1")
    assert (result.stdout, result.stderr) == ("\x1b[31mred\n", "Error: job job1: internal: \u241b[2J\n")


def test_operations_page_explains_every_command_and_state() -> None:
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "operations.md").read_text()
    section = page[page.index("## Commands") :].split("\n## ")[0]
    names = {f"dead {name}" for name in dead_group.commands}
    names |= {"ps", "queue", "top", "show", "cancel", "doctor", "bench"}
    assert [name for name in sorted(names) if f"`gllm {name}" not in section and f"`{name}" not in section] == []
    assert [state for state in (*get_args(JobState), *get_args(WorkerState)[1:]) if f"`{state}`" not in section] == []
