"""The head of a GGUF file, versions 2 and 3 (docs/gguf.md of the ggml project): metadata and where tensors lie.

The `gguf` package reads it too, but makes several numpy views of each string: 1.7 s for the 98,000 of the demo model's
vocabulary, twice that for today's larger ones, all of it before a worker is ready. This takes a twentieth of it.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from engine.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct codes
STRING, ARRAY = 8, 9
Found = TypeVar("Found")
ALIGNMENT = 32  # of tensors, unless the metadata says otherwise
MAX_NESTING = 4  # arrays of arrays; real files have none


class TensorInfo(Struct, frozen=True):
    """Where a tensor lies: `shape`, the fastest dimension first; `offset` in bytes from the file's start."""

    name: str
    shape: list[int]
    kind: int  # ggml_type
    offset: int


def read_metadata(path: Path) -> dict[str, Any]:
    """All keys and values before the tensors, arrays as lists. Raises ModelError for what is no whole GGUF head."""
    return _read(path, _Head.entries)


def read_head(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """The metadata, and the tensors in the file's order. Raises ModelError for what is no whole GGUF head."""
    return _read(path, _Head.entries_and_tensors)


def _read(path: Path, read: "Callable[[_Head], Found]") -> "Found":
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(_Head(data))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{path}: not a readable GGUF file: {error}") from error


class _Head:
    """Reads on from where it is. Every length is checked against what is left, so a broken one costs nothing."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._tensors = 0

    def entries(self) -> dict[str, Any]:
        if self._take(4) != MAGIC:
            raise ValueError(f"it begins with {self._data[:4]!r}")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, only {VERSIONS} are known")
        self._tensors = self._number("Q")
        entries: dict[str, Any] = {}
        for _ in range(self._count("Q", 1)):
            name = self._string()
            if name in entries:
                raise ValueError(f"{name} stands in it twice")
            entries[name] = self._value(self._number("I"))
        return entries

    def entries_and_tensors(self) -> tuple[dict[str, Any], list[TensorInfo]]:
        entries = self.entries()
        infos = [self._tensor() for _ in range(self._tensors)]
        alignment = entries.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return entries, [TensorInfo(info.name, info.shape, info.kind, start + info.offset) for info in infos]

    def _tensor(self) -> TensorInfo:
        name = self._string()
        shape = self._numbers("Q", self._count("I", 8))
        return TensorInfo(name, shape, self._number("I"), self._number("Q"))

    def _value(self, kind: int, nesting: int = 0) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY and nesting < MAX_NESTING:
            return self._array(self._number("I"), nesting + 1)
        return self._number(_code(kind))

    def _array(self, kind: int, nesting: int) -> list[Any]:
        if kind in NUMBERS:
            return self._numbers(NUMBERS[kind], self._count("Q", struct.calcsize(NUMBERS[kind])))
        count = self._count("Q", 8)
        return self._strings(count) if kind == STRING else [self._value(kind, nesting) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As `_string` so often, in a loop of its own: there are 100,000 in the arrays of a vocabulary."""
        data, at, found = self._data, self._at, list[str]()
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            found.append(str(data[start:at], "utf-8"))
            if at > len(data):
                raise ValueError(f"a text of {at - start} bytes is announced at byte {start}, the file ends before")
        self._at = at
        return found

    def _count(self, code: str, smallest: int) -> int:
        """How many things of at least `smallest` bytes follow."""
        count = self._number(code)
        if count * smallest > len(self._data) - self._at:
            raise ValueError(f"{count} entries are announced at byte {self._at}, the file ends before")
        return count

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> list[Any]:
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))

    def _string(self) -> str:
        return str(self._take(self._number("Q")), "utf-8")

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"{size} bytes are announced at byte {start}, the file ends before")
        return self._data[start : self._at]


def _code(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"a value of the unknown type {kind}")
    return NUMBERS[kind]
