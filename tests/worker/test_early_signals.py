"""Signals that come while a command is still being imported."""

import signal
import subprocess
import sys

import pytest

HELD = """
import sys, threading

class Held:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == sys.argv[0]:
            print("importing", flush=True)
            threading.Event().wait()

sys.meta_path.insert(0, Held)
from worker.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("module", ["click", "worker.service"])
def test_worker_that_is_still_imported_ends_as_asked(module: str, number: signal.Signals) -> None:
    assert ended("worker", held=module, number=number) == (0, "")


@pytest.mark.parametrize(("module", "status"), [("click", -signal.SIGINT), ("worker.inspection.inspector", 130)])
def test_ctrl_c_ends_a_command_that_is_still_imported_without_a_word(module: str, status: int) -> None:
    assert ended("ps", held=module, number=signal.SIGINT) == (status, "")


def test_command_that_a_shell_runs_in_the_background_does_not_heed_ctrl_c() -> None:
    """`gllm bench &` in a script: the shell has told it to ignore what is meant for others."""
    code = (
        "import signal, os, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    inner = "import os, signal; from worker.__main__ import main; os.kill(os.getpid(), signal.SIGINT); main()"
    command = [sys.executable, "-c", code, sys.executable, "-c", inner, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def ended(command: str, *, held: str, number: signal.Signals) -> tuple[int, str]:
    """Exit status and standard error of a command that gets a signal in the middle of an import."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD.replace("sys.argv[0]", repr(held)), command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "importing\n"
            process.send_signal(number)
            return process.wait(30), process.stderr.read()
        finally:
            process.kill()
