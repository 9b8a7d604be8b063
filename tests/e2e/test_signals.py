"""Signals at moments that are hard to hit by hand."""

import os
import re
import signal
import time
from pathlib import Path

from tests.e2e.conftest import Start


def test_sigterm_again_and_again_ends_the_worker_as_asked(start: Start) -> None:
    """Also one that comes when the event loop has gone and taken its handlers with it."""
    worker = start()
    worker.wait_event("ready")
    end = time.monotonic() + 30
    while worker.process.poll() is None:
        assert time.monotonic() < end, worker.said
        worker.process.send_signal(signal.SIGTERM)
        time.sleep(0.0005)
    assert worker.process.returncode == 0, worker.said


def test_closed_terminal_drains_the_worker_and_leaves_the_engine_to_it(start: Start) -> None:
    """SIGHUP goes to every process of a terminal, the engine's too."""
    worker = start()
    worker.wait_event("ready")
    for process in (*worker.descendants(), worker.process.pid):
        os.kill(process, signal.SIGHUP)
    assert worker.wait_exit() == 0, worker.said
    assert worker.wait_event("draining")


def test_hangup_of_a_terminal_does_not_matter_under_nohup(start: Start) -> None:
    worker = start(wrap=("nohup",))
    worker.wait_event("ready")
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    ignored = int(re.search(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)[1], 16)  # pyright: ignore[reportOptionalSubscript]
    assert ignored >> (signal.SIGHUP - 1) & 1, "the worker has a handler of its own for SIGHUP"
