"""A load as a picture: how latencies are spread, and what went on over time. Needs matplotlib (the extra `bench`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from worker.load.figures import Figures, since
from worker.load.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 60
# Name, moment, width: the first two coincide where a start is written with the first token.
CURVES = (("queue wait", "started", 3.5), ("first token", "first", 1.5), ("end to end", "ended", 1.5))


def plot(path: Path, title: str, records: Sequence[Record], found: Figures, began: float) -> None:
    """Writes a PNG. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, whatever the machine has
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title.replace("$", r"\$"), fontsize=11)
    left, right = figure.subplots(1, 2)
    _spread(left, records, found)
    _course(right, records, found, began)
    with path.open("wb") as file:
        figure.savefig(file, format="png")


def _spread(axes: "Axes", records: Sequence[Record], found: Figures) -> None:
    """Which share of the jobs had it after so many seconds."""
    for name, moment, width in CURVES:
        chosen = [record for record in records if record.well or moment != "ended"]
        values = sorted(max(1e-4, value) for value in since(chosen, "due", moment))
        if values:
            shares = [100 * (place + 1) / len(values) for place in range(len(values))]
            axes.step([values[0], *values], [0, *shares], where="post", label=name, linewidth=width)
    gap = found.latencies["inter_token"]
    if gap.p50:
        axes.axvline(gap.p50, color="grey", linestyle=":", label="between tokens, median")
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.set(xlabel="seconds since the job was due", ylabel="% of jobs")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", fontsize=8)


def _course(axes: "Axes", records: Sequence[Record], found: Figures, began: float) -> None:
    """Tokens a second and unfinished jobs over time."""
    width = max(found.seconds, 1e-3) / BINS
    rates = [0.0] * BINS
    for record in records:
        for moment, count in zip(record.arrivals[::2], record.arrivals[1::2], strict=True):
            rates[min(BINS - 1, int((moment - began) / width))] += count / width
    axes.stairs(rates, [number * width for number in range(BINS + 1)], fill=True, alpha=0.5, label="tokens/s")
    axes.set(xlabel="seconds", ylabel="tokens/s", xlim=(0, BINS * width))
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    times, counts = open_jobs(records, began)
    other.step(times, counts, where="post", color="tab:red", label="unfinished jobs")
    other.set_ylabel("unfinished jobs", color="tab:red")
    other.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def open_jobs(records: Sequence[Record], began: float) -> tuple[list[float], list[int]]:
    """Moments, and how many jobs were due and had not ended from each of them on."""
    changes = [(record.due - began, 1) for record in records]
    changes += [(record.ended - began, -1) for record in records if record.ended is not None]
    times, counts, open_now = [0.0], [0], 0
    for moment, change in sorted(changes):
        open_now += change
        times.append(moment)
        counts.append(open_now)
    return times, counts
