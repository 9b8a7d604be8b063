"""Signals at moments that are hard to hit by hand."""

import signal
import time

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
