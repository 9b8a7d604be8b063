"""The engine's process, two things added: each step takes a while, and a step with the poison in it kills.

CHAOS_PACE: seconds that each step sleeps first, so that replies last long enough to be disturbed and cost few cycles.
CHAOS_POISON: who dies of a prompt with the token POISON in it, before the step: `engine` (SIGSEGV) or `worker`
(SIGKILL, which takes the engine with it).
"""

import os
import signal
import sys
import time

from engine import child
from engine.handle import Handle
from engine.plan import Plan
from engine.runner import Runner
from tests.chaos.workload import POISON

PACE = float(os.environ.get("CHAOS_PACE", "0"))
VICTIM = os.environ.get("CHAOS_POISON", "")
_launch = Runner.launch


def launch(runner: Runner, plan: Plan) -> Handle:
    time.sleep(PACE)
    if VICTIM and any(POISON in entry.sequence.request.tokens for entry in plan.entries):
        _kill()
    return _launch(runner, plan)


def _kill() -> None:
    if VICTIM == "engine":
        os.kill(os.getpid(), signal.SIGSEGV)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)  # until the kernel's parent-death signal


if __name__ == "__main__":
    Runner.launch = launch
    sys.exit(child.main(int(sys.argv[1])))
