"""Traces of real requests: when they came, how long they were, and what their prompts had in common.

Azure (AzurePublicDataset, CSV): TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake (FAST 2025, JSON lines):
`timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens of the prompt and one for
the rest: equal ids stand for equal tokens, from the prompt's start. Either may be gzipped.
"""

import csv
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

BLOCK = 512  # tokens that one hash id of Mooncake's stands for
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TOKENS = 2**31 - 1

T = TypeVar("T")

Length = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class Request(Struct, frozen=True):
    """`at`: seconds since the first request. `blocks`: Mooncake's hash ids; empty where nothing is known."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class _Mooncake(Struct, frozen=True):
    timestamp: float
    input_length: Length
    output_length: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: list[Annotated[int, Meta(ge=0, le=2**63 - 1)]] = []


def read_trace(path: Path) -> list[Request]:
    """All requests in order of arrival. Raises ValueError naming file, line and value; OSError."""
    lines = _text(path).splitlines()
    first = next((line for line in lines if line.strip()), "")
    if not first:
        raise ValueError(f"{path}: the trace is empty")
    found = list((_mooncake if first.lstrip().startswith("{") else _azure)(path, lines))
    if not found:
        raise ValueError(f"{path}: the trace has no request")
    found.sort(key=lambda request: request.at)
    start = found[0].at
    return [msgspec.structs.replace(request, at=request.at - start) for request in found]


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: neither text nor gzipped text: {error}") from None


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[Request]:
    decode = msgspec.json.Decoder(_Mooncake).decode
    for number, line in enumerate(lines, start=1):
        if line.strip():
            with_line = _Line(path, number, line)
            request = with_line.read(lambda text: decode(text.encode()))
            wanted = -(-request.input_length // BLOCK)
            if request.hash_ids and len(request.hash_ids) != wanted:
                raise with_line.error(f"{wanted} hash_ids expected for {request.input_length} tokens")
            yield Request(
                request.timestamp / 1000, request.input_length, request.output_length, tuple(request.hash_ids)
            )


def _azure(path: Path, lines: list[str]) -> Iterator[Request]:
    rows = csv.reader(lines)
    names = [name.strip() for name in next(rows)]
    if missing := [name for name in AZURE if name not in names]:
        raise ValueError(f"{path}, line 1: neither a column {missing[0]} nor a JSON object: {lines[0][:80]!r}")
    columns = [names.index(name) for name in AZURE]
    for row in rows:
        if row:
            yield _Line(path, rows.line_num, ",".join(row)).read(lambda _, row=row: _azure_request(row, columns))


def _azure_request(row: list[str], columns: list[int]) -> Request:
    moment, prompt, output = (row[column].strip() for column in columns)
    prompt_tokens, output_tokens = int(prompt), int(output)
    if not (1 <= prompt_tokens <= MAX_TOKENS and 0 <= output_tokens <= MAX_TOKENS):
        raise ValueError("a length is out of range")
    when = datetime.fromisoformat(moment)
    return Request((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp(), prompt_tokens, output_tokens)


class _Line:
    """A line of a file, for errors that say where they are."""

    def __init__(self, path: Path, number: int, text: str) -> None:
        self._where = f"{path}, line {number}"
        self._text = text

    def read(self, parse: Callable[[str], T]) -> T:
        try:
            return parse(self._text)
        except (ValueError, IndexError, OverflowError, msgspec.MsgspecError) as error:
            raise self.error(str(error)) from None

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self._where}: {what}: {self._text[:80]!r}")
