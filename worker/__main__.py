"""The program `gllm`: what a signal does until the command that is asked for has been imported.

That takes half a second, on a busy machine more. Without this, a worker that is process 1 of a container would not hear
SIGTERM in that time, because the kernel drops what process 1 has not asked for; and Ctrl-C would print a traceback.
"""

import os
import signal
import sys


def main() -> None:
    """Run the command that `sys.argv` names."""
    if sys.argv[1:2] == ["worker"]:
        leave_as_asked()
    from_terminal = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else a shell said to ignore it
    if from_terminal:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from worker.cli import main as command

    if from_terminal:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def leave_as_asked() -> None:
    """Until the worker heeds signals itself, there is nothing that it would have to bring to an end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda *_: os._exit(0))


if __name__ == "__main__":
    main()
