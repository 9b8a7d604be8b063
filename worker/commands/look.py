"""`gllm ps` and `gllm queue`: what runs, what waits, who works."""

from typing import TYPE_CHECKING

import click

from worker.commands.access import inspected
from worker.commands.job_table import STATE_COLOURS, job_table
from worker.commands.options import setting_options
from worker.commands.screen import page, present, reading_options
from worker.commands.tables import Cell, Column, Page
from worker.humane import NOTHING, duration, number
from worker.terminal import json_line

if TYPE_CHECKING:
    from worker.inspection.inspector import Inspector
    from worker.inspection.records import JobList, QueueView, WorkerRow

WORKER_COLUMNS = (
    Column("WORKER", shrinks=True),
    Column("STATE"),
    Column("JOBS", right=True),
    Column("HEARTBEAT", right=True),
    Column("UP", right=True),
    Column("DEVICE", shrinks=True),
    Column("TRIAL", shrinks=True),
    Column("NUMERICS", shrinks=True),
    Column("VERSION"),
)
QUEUE_COLUMNS = (
    Column("PRIORITY"),
    Column("WAITING", right=True),
    Column("RUNNING", right=True),
    Column("LAG", right=True),
    Column("OLDEST", right=True),
)


@click.command("ps", short_help="Jobs that run and wait, and the workers.")
@setting_options("redis", "queue")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Most jobs to show.")
@reading_options
def ps_command(redis: str | None, queue: str | None, limit: int, as_json: bool, watch: float | None) -> None:
    """Jobs that run and wait, in the order of their turn, and the workers of a queue."""
    with inspected(redis, queue) as inspector:
        present(lambda: _ps(inspector, limit, as_json), watch)


def _ps(inspector: "Inspector", limit: int, as_json: bool) -> str:
    survey = inspector.survey()
    workers = inspector.workers(survey)
    jobs = inspector.jobs(limit, survey, workers)
    if as_json:
        import msgspec

        return json_line({"queue": inspector.keys.queue, **msgspec.structs.asdict(jobs), "workers": workers})
    to = page()
    return "\n".join([*job_lines(to, inspector.keys.queue, jobs), "", *worker_lines(to, workers)])


def job_lines(to: Page, queue: str, jobs: "JobList") -> list[str]:
    """Counts, a table of jobs, and how many are not in it."""
    head = f"queue {queue}: {jobs.held - jobs.orphaned:,} running, {jobs.waiting:,} waiting"
    rare = {"orphaned": jobs.orphaned, "released": jobs.released, "delayed": jobs.delayed}
    head += "".join(f", {count:,} {name}" for name, count in rare.items() if count)
    if not jobs.jobs:
        return [head]
    rest = [f"… and {jobs.hidden:,} more"] if jobs.hidden else []
    return [head, "", *job_table(to, jobs.jobs), *rest]


def worker_lines(to: Page, workers: "list[WorkerRow]") -> list[str]:
    """A table of workers, or that there is none."""
    if not workers:
        return [to.paint("no workers", "red")]
    return to.table(WORKER_COLUMNS, map(_worker_row, workers))


def _worker_row(worker: "WorkerRow") -> list[str | Cell]:
    return [
        worker.name,
        Cell(worker.state, STATE_COLOURS[worker.state]),
        f"{worker.jobs}/{worker.capacity}" if worker.capacity else str(worker.jobs),
        duration(worker.heartbeat_ms),
        duration(worker.up_ms),
        worker.device or NOTHING,
        worker.trial or NOTHING,
        worker.numerics or NOTHING,
        worker.version or NOTHING,
    ]


@click.command("queue", short_help="How many jobs wait and run, per priority.")
@setting_options("redis", "queue")
@reading_options
def queue_command(redis: str | None, queue: str | None, as_json: bool, watch: float | None) -> None:
    """How many jobs wait and run, per priority, and how long the oldest has waited.

    LAG is what Redis says of entries not yet delivered, `-` where it has lost count.
    """
    with inspected(redis, queue) as inspector:
        present(lambda: _queue(inspector.queue(), as_json), watch)


def _queue(view: "QueueView", as_json: bool) -> str:
    if as_json:
        return json_line(view)
    to = page()
    rows = [
        [row.priority, number(row.waiting), number(row.held), number(row.lag), duration(row.oldest_ms)]
        for row in view.priorities
    ]
    return "\n".join([*to.table(QUEUE_COLUMNS, rows), "", *to.pairs(_totals(view))])


def _totals(view: "QueueView") -> list[tuple[str, str | Cell | None]]:
    due = view.due_in_ms
    when = "" if due is None else f", the next {f'in {duration(due)}' if due > 0 else f'overdue for {duration(-due)}'}"
    silent = f", {view.workers_silent:,} silent" if view.workers_silent else ""
    return [
        ("delayed", f"{view.delayed:,}{when}"),
        ("dead", Cell(f"{view.dead:,}" + (": gllm dead ls" if view.dead else ""), "yellow" if view.dead else None)),
        ("workers", Cell(f"{view.workers_alive:,} alive{silent}", None if view.workers_alive else "red")),
        *(("problem", Cell(problem, "red")) for problem in view.problems),
    ]
