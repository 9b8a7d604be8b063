"""A whole terminal for a program that redraws it, and the keys that are pressed meanwhile. Given back whatever happens.

Nothing is drawn by signal handlers: they only wake the wait, so that a resize or a stop comes between two drawings.
"""

import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

_BEGIN, _END = "\033[?1049h\033[2J\033[?7l\033[?25l", "\033[?7h\033[?25h\033[?1049l"
_HOME, _REST_OF_LINE, _REST = "\033[H", "\033[K", "\033[J"
_SIGNALS = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGTERM)
QUIT = "q"


class Terminal:
    """Use it as a context manager. Ctrl-C is KeyboardInterrupt as ever; SIGTERM is as if q was pressed."""

    def __init__(self) -> None:
        self._keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._saved: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._wake)

    @property
    def size(self) -> os.terminal_size:
        """The terminal's own word: LINES and COLUMNS of the environment would not follow a resize."""
        try:
            return os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return shutil.get_terminal_size()

    def draw(self, lines: Iterable[str]) -> None:
        """These lines over what stood there; what is below the last line of the screen is left out."""
        shown = list(lines)[: self.size.lines]
        _write(_HOME + "\n".join(f"{line}{_REST_OF_LINE}" for line in shown) + _REST)

    def wait(self, seconds: float) -> str:
        """The key that was pressed, or empty: after so many seconds, and as soon as the screen must be drawn anew."""
        watched = [self._woken] if self._keyboard is None else [self._woken, self._keyboard]
        ready, _, _ = select.select(watched, [], [], max(0.0, seconds))
        if self._woken in ready:
            return self._answer(os.read(self._woken, 64))
        return self._pressed() if ready else ""

    def _pressed(self) -> str:
        assert self._keyboard is not None
        key = os.read(self._keyboard, 64)
        if not key:
            self._keyboard = None  # the terminal is gone, or somebody closed its input
        return key[:1].decode(errors="replace")

    def _answer(self, signals: bytes) -> str:
        if signal.SIGTERM in signals:
            return QUIT
        if signal.SIGTSTP in signals:
            self._suspend()
        return ""

    def _suspend(self) -> None:
        """Ctrl-Z: the terminal is the shell's until `fg`."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _signalled(self, number: int, _: object) -> None:
        with suppress(BlockingIOError):  # a full pipe: it is awake already
            os.write(self._wake, bytes([number]))

    def _take(self) -> None:
        if self._keyboard is not None:
            self._saved = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard)
        _write(_BEGIN)

    def _give_back(self) -> None:
        _write(_END)
        if self._keyboard is not None and self._saved is not None:
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._saved)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
