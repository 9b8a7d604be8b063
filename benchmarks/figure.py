"""One measured number, and what was asked of it."""

from collections.abc import Iterable

from msgspec import Struct


class Figure(Struct, frozen=True):
    """`limit` is the most that `value` may be, or with `at_least` the least; None where nothing is asked."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        number = f"{self.value:,.0f}" if self.value == int(self.value) else f"{self.value:,.4g}"
        asked = "" if self.limit is None else f"  ({'at least' if self.at_least else 'at most'} {self.limit:g}"
        return f"{number:>12} {self.unit:<9} {self.name}{asked}{asked and (': met)' if self.met else ': NOT MET)')}"


def as_json(figures: Iterable[Figure]) -> list[dict[str, object]]:
    return [
        {"name": f.name, "value": f.value, "unit": f.unit, "limit": f.limit, "at_least": f.at_least, "met": f.met}
        for f in figures
    ]
