"""`gllm top` on a terminal: keys, resizes, signals, a lost Redis. The terminal is given back as it was."""

import fcntl
import os
import pty
import signal
import struct
import termios

import pytest

from gllm.keys import Keys
from tests.servers import Server, first_kind
from tests.worker.command_bench import Commands
from tests.worker.test_commands_screen import read_until


@pytest.fixture
def server_kind() -> str:
    """One kind is enough for what happens on this side of it."""
    return first_kind()


class OnTerminal:
    """`gllm top` on a terminal of its own."""

    def __init__(self, url: str, keys: Keys, *arguments: str) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(24, 100)
        self.before = termios.tcgetattr(self.theirs)
        self.process = Commands(url, keys).process(
            "top", "--interval", "30", *arguments, stdin=self.theirs, stdout=self.theirs, stderr=self.theirs,
            start_new_session=True,
        )  # fmt: skip

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, wanted: bytes) -> bytes:
        return read_until(self.ours, wanted)

    def read_page(self, lines: int) -> None:
        """Until a page of so many lines has come, however the terminal cuts it up; one of before may come once more."""
        seen = b""
        while not any(page.count(b"\n") == lines - 1 for page in seen.split(b"\x1b[H")):
            seen += self.read(b"\n")

    def press(self, key: bytes) -> None:
        os.write(self.ours, key)

    def left(self) -> int:
        """It ends, and the terminal is as it was."""
        self.read(b"\x1b[?1049l")
        status = self.process.wait(20)
        assert termios.tcgetattr(self.theirs) == self.before
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def test_keys_and_resizes_change_the_screen_at_once(redis_url: str, queue_name: str) -> None:
    terminal = OnTerminal(redis_url, Keys(queue_name))
    try:
        seen = terminal.read(b"now by turn")
        assert seen.startswith(b"\x1b[?1049h")
        assert seen.count(b"\n") == 23
        terminal.press(b"s")
        terminal.read(b"now by age")
        terminal.resize(30, 100)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.read_page(lines=30)
        terminal.press(b"q")
        assert terminal.left() == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_give_the_terminal_back(redis_url: str, queue_name: str, number: signal.Signals) -> None:
    terminal = OnTerminal(redis_url, Keys(queue_name))
    try:
        terminal.read(b"now by turn")
        terminal.process.send_signal(number)
        assert terminal.left() == 0
    finally:
        terminal.close()


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(redis_url: str, queue_name: str) -> None:
    terminal = OnTerminal(redis_url, Keys(queue_name))
    try:
        terminal.read(b"now by turn")
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.read(b"\x1b[?1049l")
        _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        terminal.process.send_signal(signal.SIGCONT)
        assert b"\x1b[?1049h" in terminal.read(b"now by turn")
        terminal.press(b"q")
        assert terminal.left() == 0
    finally:
        terminal.close()


def test_lost_redis_is_said_above_what_was_seen_last(own_server: Server, queue_name: str) -> None:
    terminal = OnTerminal(own_server.url, Keys(queue_name), "--interval", "0.1")
    try:
        terminal.read(b"no workers")
        own_server.stop(kill=True)
        terminal.read(b"Redis: ")
        terminal.read(b"no workers")
        own_server.start()
        while b"Redis: " in terminal.read(b"now by turn"):
            pass
        terminal.press(b"q")
        assert terminal.left() == 0
    finally:
        terminal.close()
