"""The dashboard without Grafana: asks a Prometheus every panel's queries and draws the answers as one PNG.

    python deploy/grafana/picture.py http://localhost:9090 dashboard.png --minutes 10

Needs matplotlib.
"""

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).parent / "dashboards" / "gllm.json"
POINTS = 240  # of a line
INCHES = (18, 0.42)  # width of the picture; height of a line of Grafana's grid
BYTES, NUMBERS = ("B", "KiB", "MiB", "GiB", "TiB"), ("", "k", "M", "G", "T")

Json = dict[str, Any]


class Line(NamedTuple):
    """One line of a graph: what its legend says, and value by Unix time."""

    legend: str
    points: dict[float, float]


class Prometheus:
    """Asks for the last `minutes` of a panel. `rate` is the time in seconds that a rate looks back."""

    def __init__(self, url: str, minutes: float, rate: float) -> None:
        self._url = url.rstrip("/")
        self._end = time.time()
        self._start = self._end - 60 * minutes
        self._rate = f"{max(1, round(rate))}s"

    def lines(self, panel: Json) -> list[Line]:
        """Everything that a panel shows, without the points that are no numbers."""
        return [line for target in panel["targets"] for line in self._answer(target)]

    def _answer(self, target: Json) -> list[Line]:
        query = target["expr"].replace("$__rate_interval", self._rate).replace("$job", ".*").replace("$instance", ".*")
        step = (self._end - self._start) / POINTS
        wanted = {"query": query, "start": self._start, "end": self._end, "step": step}
        with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(wanted)}") as answer:
            found = json.load(answer)["data"]["result"]
        lines = [Line(_legend(target["legendFormat"], one["metric"]), _points(one["values"])) for one in found]
        return [line for line in lines if line.points]


def _points(values: list[list[Any]]) -> dict[float, float]:
    numbers = ((moment, float(value)) for moment, value in values)
    return {moment: number for moment, number in numbers if math.isfinite(number)}


def _legend(pattern: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        pattern = pattern.replace(f"{{{{{name}}}}}", value)
    return pattern


def shown(number: float, unit: str) -> str:
    """A number as Grafana would write it."""
    if unit == "percentunit":
        return f"{100 * number:.3g} %"
    if unit == "s":
        return f"{1000 * number:.3g} ms" if 0 < number < 1 else f"{number:.3g} s"
    step, names = (1024, BYTES) if unit == "bytes" else (1000, NUMBERS)
    power = min(len(names) - 1, int(math.log(number, step)) if number >= 1 else 0)
    return f"{number / step**power:.3g} {names[power]}".strip() + ("/s" if unit == "ops" else "")


def draw(panels: list[Json], prometheus: Prometheus, target: Path) -> None:
    """Each panel at its place in the grid."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = pyplot.figure(figsize=(INCHES[0], INCHES[1] * lines), dpi=80)
    for panel in panels:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - place["y"] / lines
        if panel["type"] == "row":
            figure.text(left + 0.005, top - 0.7 / lines, panel["title"], weight="bold", size=13, va="center")
            continue
        size = (place["w"] / 24 - 0.05, (place["h"] - 2.6) / lines)
        axes = figure.add_axes((left + 0.04, top - (place["h"] - 1.3) / lines, *size))
        axes.set_title(panel["title"], size=10, loc="left")
        (number if panel["type"] == "stat" else graph)(axes, panel, prometheus.lines(panel))
    figure.savefig(target)
    pyplot.close(figure)


def number(axes: Any, panel: Json, lines: list[Line]) -> None:
    """The newest value, large."""
    axes.axis("off")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    newest = [line.points[max(line.points)] for line in lines]
    axes.text(0.5, 0.45, shown(newest[0], unit) if newest else "no data", size=20, ha="center", va="center")


def graph(axes: Any, panel: Json, lines: list[Line]) -> None:
    """Lines over time, one above the other where the panel says so."""
    defaults = panel["fieldConfig"]["defaults"]
    moments = sorted({moment for line in lines for moment in line.points})
    ages = [(moment - moments[-1]) / 60 for moment in moments]
    rows = [[line.points.get(moment, math.nan) for moment in moments] for line in lines]
    if lines and "stacking" in defaults["custom"]:
        axes.stackplot(ages, [[0 if math.isnan(value) else value for value in row] for row in rows], alpha=0.7)
    for row in [] if "stacking" in defaults["custom"] else rows:
        axes.plot(ages, row, linewidth=1.2)
    axes.set_ylim(bottom=0, top=1.02 * defaults["max"] if "max" in defaults else None)
    axes.yaxis.set_major_formatter(lambda value, _: shown(value, defaults["unit"]))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if lines:
        legends = [line.legend for line in lines[:6]]
        axes.legend(axes.collections or axes.lines, legends, fontsize=7, loc="upper left", framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prometheus", help="URL of a Prometheus")
    parser.add_argument("target", type=Path, help="the PNG to write")
    parser.add_argument("--minutes", type=float, default=60, help="how far to look back")
    parser.add_argument("--rate", type=float, default=40, help="seconds a rate looks back: four scrapes")
    given = parser.parse_args()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    draw(panels, Prometheus(given.prometheus, given.minutes, given.rate), given.target)


if __name__ == "__main__":
    main()
