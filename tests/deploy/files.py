"""The files of deploy/ and around it, read as their programs read them."""

import re
from pathlib import Path
from typing import Any

import yaml

from worker.config import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PASSWORD = "of-a-test"
VARIABLES = {name for option in OPTIONS for name in option.variables}  # that a worker understands
REFERENCE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<operator>:?[-?])(?P<word>[^}]*))?\}")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def compose(name: str, environment: dict[str, str]) -> dict[str, Any]:
    """A compose file with its variables put in. Raises KeyError for one that must be set and is not."""
    return yaml.safe_load(REFERENCE.sub(lambda found: _value(found, environment), (ROOT / name).read_text()))


def _value(found: re.Match[str], environment: dict[str, str]) -> str:
    name, operator, word = found["name"], found["operator"] or "", found["word"]
    given = environment.get(name)
    if given is not None and (given or not operator.startswith(":")):
        return given
    if operator.endswith("?"):
        raise KeyError(f"{name}: {word}")
    return word or ""


def dockerfile() -> list[tuple[str, str]]:
    """Instruction and argument of each step, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, argument) for name, argument in lines]


def seconds(duration: str) -> int:
    """Of `45s` or `10m`."""
    return int(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]
