"""`gllm` as it is, but its engine's process is `tests.chaos.paced_engine`."""

from worker import bridge
from worker.cli import main

bridge.CHILD = "tests.chaos.paced_engine"

if __name__ == "__main__":
    main()
