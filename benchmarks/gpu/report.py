"""What a stage says: a line for each thing that was measured or checked, kept as soon as it is known."""

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct


class Line(Struct, frozen=True, kw_only=True):
    """One thing that was measured or checked.

    `bound` is the best that `value` could be, in its unit, `target` the share of it that is wanted; of rates more is
    better, of times less. `ok`: whether a check passed; None where nothing was checked. `said`: in words, such as "not
    built", or the error.
    """

    name: str
    value: float | None = None
    unit: str = ""
    bound: float | None = None
    target: float | None = None
    ok: bool | None = None
    said: str = ""

    @property
    def share(self) -> float | None:
        """How much of the bound was reached."""
        if not self.value or not self.bound:
            return None
        return self.value / self.bound if self.unit.endswith("/s") else self.bound / self.value

    @property
    def met(self) -> bool | None:
        """Whether the check passed, or the target was reached; None where nothing is asked."""
        if self.ok is not None or self.share is None or self.target is None:
            return self.ok
        return self.share >= self.target

    def text(self) -> str:
        number = "" if self.value is None else f"{self.value:,.4g} {self.unit}"
        share = "" if self.share is None else f"{self.share:.0%} of {self.bound:,.4g}"
        verdict = {
            None: "",
            True: "met" if self.ok is None else "ok",
            False: "NOT MET" if self.ok is None else "FAILED",
        }
        return f"{self.name:<56} {number:>18} {share:>18} {verdict[self.met]:>8}  {self.said}".rstrip()


class Stage(Struct, frozen=True, kw_only=True):
    """What came of a stage. `ended`: "done", "out of time", or how it failed."""

    name: str
    ended: str
    seconds: float
    lines: list[Line]


def not_built(name: str, why: str) -> Line:
    """For what this checkout, or this machine, does not have: it is said, never made up."""
    return Line(name=name, said=f"not built: {why}")


def read_lines(path: Path) -> list[Line]:
    """What a stage wrote, up to where it was stopped."""
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [msgspec.json.decode(line, type=Line) for line in whole]


def table(facts: dict[str, str], stages: Iterable[Stage]) -> str:
    lines = [f"{name:>16}  {value}" for name, value in facts.items()]
    for stage in stages:
        lines += ["", f"{stage.name}: {stage.ended}, {stage.seconds:.0f} s", *(line.text() for line in stage.lines)]
    return "\n".join(lines)


def as_json(facts: dict[str, str], stages: Iterable[Stage]) -> str:
    """The same with all digits, and the shares worked out."""
    shown = [
        msgspec.to_builtins(stage)
        | {"lines": [msgspec.to_builtins(line) | {"share": line.share, "met": line.met} for line in stage.lines]}
        for stage in stages
    ]
    return json.dumps({"environment": facts, "stages": shown}, indent=1)
