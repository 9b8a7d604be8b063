"""What happened in a run, and when: everybody writes into it, and a failure prints it."""

import threading
import time
from typing import NamedTuple


class Note(NamedTuple):
    seconds: float  # since the run began
    text: str

    def __str__(self) -> str:
        return f"{self.seconds:8.3f}  {self.text}"


class Diary:
    """Notes with times, from any thread."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self.notes: list[Note] = []

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._begin

    def write(self, text: str) -> float:
        """Returns the time of the note."""
        with self._lock:
            self.notes.append(Note(self.seconds, text))
            return self.notes[-1].seconds
