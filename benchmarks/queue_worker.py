"""`gllm worker` with an engine's stand-in (`benchmarks.queue_engine`): all else is real, in processes of its own."""

import time

from benchmarks.queue_engine import Plan, index_of
from benchmarks.queue_stamps import Stamps
from worker import bridge
from worker.active import ActiveJob
from worker.cli import main as command
from worker.jobs import Jobs
from worker.queue import Claimed


def note_claims(stamps: Stamps) -> None:
    """Note the moment that a job comes out of a claim."""
    take = Jobs.take

    def noted(self: Jobs, claimed: Claimed) -> ActiveJob:
        stamps.view[stamps.claimed(index_of(claimed.id))] = time.monotonic()
        return take(self, claimed)

    Jobs.take = noted


def main() -> None:
    bridge.CHILD = "benchmarks.queue_engine"
    note_claims(Plan.of_environment().open_stamps())
    command()


if __name__ == "__main__":
    main()
