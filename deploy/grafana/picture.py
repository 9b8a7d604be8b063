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
POINTS = 240  # of a line, and one more for the beginning
BYTES, NUMBERS = ("B", "KiB", "MiB", "GiB", "TiB"), ("", "k", "M", "G", "T")

# Inches, but for the grid's 24 columns.
WIDTH, LINE, COLUMNS, DPI = 17.0, 0.33, 24, 80
GAP, LEFT, RIGHT, TITLE, TICKS, LEGEND = 0.05, 0.62, 0.15, 0.38, 0.3, 0.19
CHARACTER = 0.064  # how wide one of a legend is; with its line and the space to the next it has six more
PAPER, CARD, INK, FAINT = "#111217", "#1b1e24", "#d5d6e0", "#343842"
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#fade2a")

Json = dict[str, Any]


class Line(NamedTuple):
    """One line of a graph: what its legend says, and a value for each moment, NaN where there is none."""

    legend: str
    values: list[float]


class Prometheus:
    """Asks for the last `minutes` of a panel. `rate` is the time in seconds that a rate looks back."""

    def __init__(self, url: str, minutes: float, rate: float) -> None:
        self.minutes = minutes
        self._url = url.rstrip("/")
        self._end = time.time()
        self._step = 60 * minutes / POINTS
        self._rate = f"{max(1, round(rate))}s"

    def lines(self, panel: Json) -> list[Line]:
        """Everything that a panel shows; lines that are never a number are left out."""
        return [line for target in panel["targets"] for line in self._answer(target)]

    def _answer(self, target: Json) -> list[Line]:
        query = target["expr"].replace("$__rate_interval", self._rate).replace("$job", ".*").replace("$instance", ".*")
        start = self._end - POINTS * self._step
        wanted = {"query": query, "start": start, "end": self._end, "step": self._step}
        with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(wanted)}") as answer:
            found = json.load(answer)["data"]["result"]
        lines = [Line(_legend(target["legendFormat"], one["metric"]), self._values(start, one)) for one in found]
        return [line for line in lines if any(map(math.isfinite, line.values))]

    def _values(self, start: float, one: Json) -> list[float]:
        values = [math.nan] * (POINTS + 1)
        for moment, value in one["values"]:
            number = float(value)
            values[round((moment - start) / self._step)] = number if math.isfinite(number) else math.nan
        return values


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


class Sheet:
    """The paper: a grid of Grafana's, on which panels have places. Inches count from the upper left corner."""

    def __init__(self, lines: int) -> None:
        from matplotlib import pyplot

        self._height = LINE * lines + 2 * GAP
        self.figure = pyplot.figure(figsize=(WIDTH, self._height), dpi=DPI, facecolor=PAPER)

    def place(self, panel: Json) -> tuple[float, float, float, float]:
        """Left, top, width and height of a panel."""
        grid, column = panel["gridPos"], (WIDTH - 2 * GAP) / COLUMNS
        return GAP + column * grid["x"], GAP + LINE * grid["y"], column * grid["w"], LINE * grid["h"]

    def text(self, left: float, top: float, text: str, **look: Any) -> None:
        self.figure.text(left / WIDTH, 1 - top / self._height, text, color=INK, va="center", **look)

    def card(self, left: float, top: float, width: float, height: float) -> None:
        """What a panel lies on."""
        axes = self.axes(left + GAP, top + GAP, width - 2 * GAP, height - 2 * GAP)
        axes.set(xticks=[], yticks=[])

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        place = (left / WIDTH, 1 - (top + height) / self._height, width / WIDTH, height / self._height)
        axes = self.figure.add_axes(place, facecolor=CARD)
        axes.spines[:].set_visible(False)
        axes.set_prop_cycle(color=COLOURS)
        return axes


def draw(panels: list[Json], prometheus: Prometheus, target: Path) -> None:
    """Each panel at its place in the grid."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sheet = Sheet(max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels))
    for panel in panels:
        left, top, width, height = sheet.place(panel)
        if panel["type"] == "row":
            sheet.text(left + 2 * GAP, top + height / 2, panel["title"], weight="bold", size=12)
            continue
        sheet.card(left, top, width, height)
        sheet.text(left + 3 * GAP, top + TITLE / 2 + GAP, panel["title"], size=10)
        (number if panel["type"] == "stat" else graph)(sheet, panel, prometheus)
    sheet.figure.savefig(target, facecolor=PAPER)
    pyplot.close(sheet.figure)


def number(sheet: Sheet, panel: Json, prometheus: Prometheus) -> None:
    """The newest value, large, above how it came to be."""
    left, top, width, height = sheet.place(panel)
    lines = prometheus.lines(panel)
    axes = sheet.axes(left + GAP, top + 0.65 * height, width - 2 * GAP, 0.35 * height - GAP)
    axes.set(xticks=[], yticks=[], xlim=(0, POINTS))
    newest = "no data"
    if lines:
        values = lines[0].values
        newest = shown([value for value in values if math.isfinite(value)][-1], unit(panel))
        axes.fill_between(range(POINTS + 1), values, color=COLOURS[2], alpha=0.25, linewidth=0)
        axes.set_ylim(bottom=0)
    sheet.text(left + width / 2, top + 0.5 * height, newest, size=19, ha="center")


def unit(panel: Json) -> str:
    return panel["fieldConfig"]["defaults"]["unit"]


def graph(sheet: Sheet, panel: Json, prometheus: Prometheus) -> None:
    """Lines over time, one above the other where the panel says so; the legend below."""
    left, top, width, height = sheet.place(panel)
    lines = prometheus.lines(panel)
    abreast = _abreast(lines, width)
    below = TICKS + LEGEND * -(-len(lines) // abreast) + GAP
    axes = sheet.axes(left + LEFT, top + TITLE, width - LEFT - RIGHT, height - TITLE - below)
    minutes = [prometheus.minutes * (index / POINTS - 1) for index in range(POINTS + 1)]
    _plot(axes, panel, minutes, lines)
    axes.set_xlim(minutes[0], 0)
    _scale(axes, panel)
    if lines:
        handles, legends = axes.collections or axes.lines, [line.legend for line in lines]
        place = {"loc": "upper left", "bbox_to_anchor": (0, -TICKS / (height - TITLE - below)), "borderpad": 0}
        look = {"fontsize": 7, "labelcolor": INK, "frameon": False, "handlelength": 1.2, "columnspacing": 1.2}
        axes.legend(handles, legends, ncols=abreast, borderaxespad=0, labelspacing=0.3, **place, **look)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=INK)


def _abreast(lines: list[Line], width: float) -> int:
    """How many legends stand in one line: all of them, or as many of the longest as there is room for."""
    room, longest = (width - LEFT) / CHARACTER, max((len(line.legend) for line in lines), default=0) + 6
    if sum(len(line.legend) + 6 for line in lines) <= room:
        return max(1, len(lines))
    return max(1, int(room / longest))


def _plot(axes: Any, panel: Json, minutes: list[float], lines: list[Line]) -> None:
    stacked = "stacking" in panel["fieldConfig"]["defaults"]["custom"]
    if stacked and lines:
        heights = [[0 if math.isnan(value) else value for value in line.values] for line in lines]
        axes.stackplot(
            minutes, heights, colors=[COLOURS[index % len(COLOURS)] for index in range(len(lines))], alpha=0.6
        )
    for line in [] if stacked else lines:
        axes.plot(minutes, line.values, linewidth=1.3)


def _scale(axes: Any, panel: Json) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    highest = defaults.get("max", axes.dataLim.y1)
    axes.set_ylim(0, 1.05 * highest if highest > 0 else 1)
    if defaults["unit"] == "bytes":
        step = 2.0 ** math.ceil(math.log2(max(1, axes.get_ylim()[1]) / 5))
        axes.set_yticks([step * index for index in range(5) if step * index <= axes.get_ylim()[1]])
    axes.yaxis.set_major_formatter(lambda value, _: shown(value, defaults["unit"]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} min".replace("-", "\u2212") if value else "now")
    axes.tick_params(labelsize=7, colors=INK, length=0, pad=4)
    axes.set_axisbelow(True)
    axes.grid(color=FAINT, linewidth=0.6)


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
