"""The process that renders chat templates: `python -m worker.chat_child SECONDS MIB`, with a socket as standard input.

The kernel bounds it. It ends by SIGPROF when one rendering takes more than SECONDS of processor time, whatever it is
doing then, and cannot get more than MIB of memory. It ends by itself when its parent closes the socket.
"""

import pickle
import resource
import signal
import socket
import sys
from datetime import datetime
from typing import Any

from worker import sandbox

HEADER_BYTES = 4  # how long the rest is, big-endian
RENDERED, FAILED = b"+", b"-"  # how an answer begins: a prompt, or why there is none

Request = tuple[str, dict[str, Any], datetime]  # the template's source, its variables, and the date it may write


def main(seconds: float, memory_mib: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the parent, which may drain for a while
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    connection = socket.socket(fileno=0)
    requests = connection.makefile("rb")
    known: dict[str, sandbox.Template] = {}
    while header := requests.read(HEADER_BYTES):
        request = requests.read(int.from_bytes(header, "big"))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(request, known) or FAILED + b"needed more than %d MiB of memory" % memory_mib
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.sendall(len(answer).to_bytes(HEADER_BYTES, "big") + answer)
    return 0


def _answer(request: bytes, known: dict[str, sandbox.Template]) -> bytes | None:
    """The prompt, or why there is none; None when there was no memory for it."""
    try:
        source, variables, now = pickle.loads(request)  # from the parent, so it is what we wrote ourselves
        return RENDERED + sandbox.render(source, variables, now, known).encode("utf-8", "surrogatepass")
    except sandbox.TemplateFailed as error:
        if not isinstance(error.__cause__, MemoryError):
            return FAILED + str(error).encode("utf-8", "surrogatepass")
    except MemoryError:
        pass
    return None


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]), int(sys.argv[2])))
