"""Logs: every line one JSON object, whatever is written and by whom."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worker import logs

SETUP = """
import logging, sys, threading, warnings
import structlog
from worker import logs
logs.configure({arguments})
log = structlog.get_logger()
"""


def written_by(code: str, arguments: str = "") -> list[str]:
    """The lines on stderr of a process that sets its logs up and runs the code."""
    script = SETUP.format(arguments=arguments) + code
    done = subprocess.run([sys.executable, "-W", "default", "-c", script], capture_output=True, timeout=60, check=False)
    assert done.stdout == b""
    return done.stderr.decode().splitlines()


def parsed(code: str, arguments: str = "") -> list[dict[str, Any]]:
    return [json.loads(line) for line in written_by(code, arguments)]


def test_logs_line_has_event_level_time_and_fields() -> None:
    [line] = parsed('log.info(logs.READY, url="http://x", seconds=1.5)')
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "ready", "level": "info", "url": "http://x", "seconds": 1.5}


def test_logs_bound_fields_come_with_each_line() -> None:
    lines = parsed('job = log.bind(id="j", epoch=3)\njob.info(logs.JOB_STARTED)\njob.warning(logs.JOB_FENCED)')
    assert [(line["event"], line["id"], line["epoch"], line["level"]) for line in lines] == [
        ("job_started", "j", 3, "info"),
        ("job_fenced", "j", 3, "warning"),
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("'two\\nlines \\x1b[31m \\u2028'", "two\nlines \x1b[31m \u2028"),
        ("float('nan')", None),
        ("float('inf')", None),
        ("'\\ud800'", "'\\ud800'"),
        ("{1, 2}", [1, 2]),
        ("{(1, 2): 3}", {"(1, 2)": 3}),
        ("'\\x85 \\u2029'", "\x85 \u2029"),
        ("2**80", 2**80),
        ("ValueError('x')", "ValueError('x')"),
        ("loop", "[[...]]"),
    ],
)
def test_logs_value_of_any_kind_leaves_the_line_valid(value: str, shown: object) -> None:
    [line] = parsed(f"loop = []\nloop.append(loop)\nlog.info(logs.READY, value={value}, other=1)")
    assert (line["value"], line["other"], line["event"]) == (shown, 1, "ready")


@pytest.mark.parametrize("odd", ["", r"\ud800"], ids=["text", "no text"])
@pytest.mark.parametrize("arguments", ["", "'console'"], ids=["json", "console"])
def test_logs_steer_no_terminal(arguments: str, odd: str) -> None:
    text = rf"'a\x1b[2J\x9b1m\u202e\n{odd}'"
    lines = written_by(f"log.info(logs.READY, text={text})\nlogging.getLogger('x').warning({text})", arguments)
    assert [("ready" in line or "library" in line, line.isprintable()) for line in lines] == [(True, True)] * 2


def test_logs_traceback_for_people_keeps_its_lines() -> None:
    lines = written_by("try:\n 1/0\nexcept ZeroDivisionError:\n log.exception(logs.FAILED)", "'console'")
    assert len(lines) > 3
    assert lines[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("body: not JSON, got b'secret'", "body: not JSON"),
        ('max_tokens: expected `int`, got `str` (got "secret")', "max_tokens: expected `int`"),
        ("secret: unknown field, got 1", "unknown field"),
        ('prompt: no tokens in "secret"', "prompt: no tokens"),
        ("prompt: 'secret': 300 is outside the model's vocabulary of 272", "prompt"),
        ("messages: the chat template failed: secret", "messages: the chat template failed"),
        ("unknown command 'X', with args beginning with: 'secret'", "unknown command 'X'"),
        ("prompt: 70 tokens, the model's limit is 64 with the reply",) * 2,
        ("max_attempts: given up after 4 workers died with it and 5 claims",) * 2,
    ],
)
def test_logs_keep_the_value_out_of_a_refusal(message: str, shown: str) -> None:
    assert logs.without_value(message) == shown


def test_logs_say_where_an_error_came_from_without_its_message() -> None:
    try:
        json.loads("secret")
    except ValueError as error:
        steps = logs.where(error)
    assert "test_logs.py" in steps[0]
    assert steps[-1].endswith(" raw_decode")
    assert "secret" not in "".join(steps)


def test_logs_lines_of_libraries_keep_the_form() -> None:
    lines = parsed("logging.getLogger('some.lib').warning('hello %s\\nthere', 'you', stack_info=True)")
    assert [(line["event"], line["message"], line["logger"]) for line in lines] == [
        ("library", "hello you\nthere", "some.lib")
    ]
    assert "stack" in lines[0]["stack_info"].lower()


def test_logs_exceptions_are_a_field() -> None:
    code = "try:\n 1/0\nexcept ZeroDivisionError:\n log.exception(logs.FAILED)\n logging.exception('lib')"
    ours, theirs = parsed(code)
    assert "ZeroDivisionError" in ours["exception"]
    assert "ZeroDivisionError" in theirs["exception"]


def test_logs_take_warnings_and_badly_formatted_records() -> None:
    lines = parsed("warnings.warn('old')\nlogging.getLogger('l').warning('%d', 'x')")
    assert [line["event"] for line in lines] == ["library", "log_failed"]
    assert "UserWarning: old" in lines[0]["message"]


@pytest.mark.parametrize(
    "code",
    [
        "raise RuntimeError('the end\\nof it')",
        "def run(): raise RuntimeError('the end\\nof it')\nt = threading.Thread(target=run); t.start(); t.join()",
        "class Bad:\n def __del__(self): raise RuntimeError('the end\\nof it')\nBad()",
    ],
    ids=["main", "thread", "destructor"],
)
def test_logs_uncaught_exceptions_are_lines_too(code: str) -> None:
    [line] = parsed(code)
    assert (line["event"], line["message"]) == ("crashed", "RuntimeError: the end\nof it")
    assert "Traceback" in line["exception"]


def test_logs_lost_task_exceptions_are_lines_too() -> None:
    code = """
import asyncio, gc
async def fail(): raise RuntimeError("lost")
async def main():
    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    gc.collect()
asyncio.run(main())
"""
    [line] = parsed(code)
    assert (line["event"], line["logger"]) == ("library", "asyncio")
    assert "lost" in line["exception"]


def test_logs_level_is_a_threshold_for_all() -> None:
    code = "log.info(logs.READY)\nlogging.getLogger('l').info('x')\nlog.warning(logs.REDIS_LOST)"
    assert [line["event"] for line in parsed(code, "level='warning'")] == ["redis_lost"]
    assert len(parsed("log.debug(logs.READY)", "level='debug'")) == 1


def test_logs_threads_do_not_mix_their_lines() -> None:
    code = """
def run(n):
    for i in range(50): log.info(logs.READY, text=str(n) * 500)
threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    assert len(parsed(code)) == 400


def test_logs_for_people_show_no_local_variables() -> None:
    code = """
def f(prompt): raise ValueError('x')
try: f('a ' + 'secret')
except ValueError: log.exception(logs.FAILED)
"""
    text = "\n".join(written_by(code, "'console'"))
    assert "failed" in text
    assert "ValueError: x" in text
    assert "a secret" not in text


def test_logs_survive_a_closed_stderr() -> None:
    script = SETUP.format(arguments="") + "sys.stderr.close()\nlog.info(logs.READY)\nprint('alive')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("alive\n", 0)


def test_logs_vocabulary_has_no_name_twice() -> None:
    names = {name: value for name, value in vars(logs).items() if name.isupper() and isinstance(value, str)}
    assert len(set(names.values())) == len(names)
    assert all(value == name.lower() for name, value in names.items())


def test_logs_code_writes_no_event_outside_the_vocabulary() -> None:
    known = {value for name, value in vars(logs).items() if name.isupper() and isinstance(value, str)}
    written = {
        node.args[0].value
        for path in Path(logs.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("debug", "info", "warning", "error", "critical", "exception")
        and ast.unparse(node.func.value).endswith(("log", "get_logger()"))
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert written <= known
