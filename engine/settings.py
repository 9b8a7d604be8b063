"""JSON objects of a checkpoint, read key by key and checked. No torch."""

import json
import math
from pathlib import Path
from typing import Any

from engine.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: a JSON object expected, got {type(content).__name__}")
    return content


class Settings:
    """One JSON object: its values by key, checked. Raises ModelError naming file, key and value.

    `within` is the key of the object itself, where it is not the file's outermost one.
    """

    def __init__(self, raw: dict[str, Any], path: Path, within: str = "") -> None:
        self.raw, self.path, self._within = raw, path, within and f"{within}."

    def refuse(self, key: str, expected: str) -> ModelError:
        return ModelError(f"{self.path}: {self._within}{key}: {expected} expected, got {self.raw.get(key)!r}")

    def given(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def count(self, key: str, most: int | None = None) -> int:
        value = self.raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(key, "a positive integer")
        if most is not None and value > most:
            raise self.refuse(key, f"at most {most}")
        return value

    def optional_count(self, key: str) -> int | None:
        return self.count(key) if self.given(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; the default is for an absent key only."""
        value = self.raw.get(key, default)
        if not _is_positive(value):
            raise self.refuse(key, "a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.given(key) else None

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of so many positive numbers."""
        values = self.raw.get(key)
        if not isinstance(values, list) or len(values) != count or not all(map(_is_positive, values)):
            raise self.refuse(key, f"a list of {count} positive numbers")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return default if value is None else value

    def words(self, key: str, known: tuple[str, ...], count: int) -> list[str] | None:
        """A list of so many of the known words, or None when it is absent, null or empty."""
        values = self.raw.get(key)
        if values in (None, []):
            return None
        if not isinstance(values, list) or len(values) != count or any(value not in known for value in values):
            raise self.refuse(key, f"{count} of {', '.join(known)}")
        return values

    def token_ids(self, key: str) -> set[int]:
        """One id, a list of them, or null."""
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self.refuse(key, "a token id or a list of them")
        return set(ids)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
