"""The table of jobs that `gllm ps` and `gllm top` share, and the colours of states. Pure functions."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from worker.commands.tables import Cell, Column, Page
from worker.humane import NOTHING, duration, number

if TYPE_CHECKING:
    from worker.inspection.records import JobRow

STATE_COLOURS = {
    "running": "green",
    "orphaned": "red",
    "released": "yellow",
    "delayed": "cyan",
    "duplicate": "magenta",
    "alive": "green",
    "silent": "yellow",
    "gone": "red",
}
JOB_COLUMNS = (
    Column("JOB", shrinks=True),
    Column("STATE"),
    Column("PRIORITY"),
    Column("AGE", right=True),
    Column("TOKENS", right=True),
    Column("ATTEMPTS", right=True),
    Column("WORKER", shrinks=True),
)
SPEED_COLUMN = Column("TOKENS/S", right=True)
SPEED_AT = 5  # behind TOKENS

T = TypeVar("T")
Speed = Callable[["JobRow"], float | None]


def job_table(to: Page, jobs: "Iterable[JobRow]", speed_of: Speed | None = None) -> list[str]:
    """The lines of the table, with a column of tokens a second where somebody knows them."""
    if speed_of is None:
        return to.table(JOB_COLUMNS, map(_row, jobs))
    columns = _inserted(JOB_COLUMNS, SPEED_COLUMN)
    return to.table(columns, [_inserted(_row(job), speed(speed_of(job))) for job in jobs])


def _inserted(values: Iterable[T], value: T) -> list[T]:
    found = list(values)
    return [*found[:SPEED_AT], value, *found[SPEED_AT:]]


def _row(job: "JobRow") -> list[str | Cell]:
    state = job.state if job.due_in_ms is None else f"{job.state} {duration(job.due_in_ms)}"
    return [
        job.id or NOTHING,
        Cell(state + (", cancelling" if job.cancelling else ""), STATE_COLOURS.get(job.state)),
        job.priority or NOTHING,
        duration(job.age_ms),
        number(job.tokens),
        number(job.attempts),
        job.worker or NOTHING,
    ]


def speed(value: float | None) -> str:
    """Tokens a second, with a decimal where it matters."""
    return NOTHING if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
