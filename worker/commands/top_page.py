"""The screen of `gllm top` as lines, and the same for programs. Pure functions."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from worker.commands.job_table import STATE_COLOURS, job_table, speed
from worker.commands.tables import Cell, Column, Page
from worker.commands.top_rates import Look, Rates, Watch
from worker.humane import NOTHING, duration
from worker.inspection.records import EngineView, JobRow, WorkerRow

Order = Literal["turn", "age", "tokens", "rate"]
ORDERS: tuple[Order, ...] = ("turn", "age", "tokens", "rate")
LEAST_ROWS = 3  # of each table, however low the terminal is
MOST_WORKERS = 50  # where there is no terminal's height
BAR = 20
WORKER_COLUMNS = (
    Column("WORKER", shrinks=True),
    Column("STATE"),
    Column("JOBS", right=True),
    Column("TOKENS/S", right=True),
    Column("PROMPT/S", right=True),
    Column("HITS", right=True),
    Column("KV", right=True),
    Column("HEARTBEAT", right=True),
    Column("UP", right=True),
    Column("DEVICE", shrinks=True),
)


class Layout(Struct, frozen=True):
    """`height`: lines of the terminal, None where there is none."""

    to: Page
    height: int | None
    order: Order


def screen(look: Look, watch: Watch, layout: Layout) -> list[str]:
    """Head, workers, jobs; what does not fit is counted."""
    head = [*layout.to.pairs(_head(look, watch)), ""]
    workers = _some(len(look.workers), _rows_for_workers(layout, len(head), len(look.workers)))
    lines = [*head, *_workers(look.workers[:workers], len(look.workers), watch, layout.to), ""]
    jobs = ordered(look.jobs.jobs, watch, layout.order)
    room = len(jobs) + 1 if layout.height is None else layout.height - len(lines) - 1
    return [*lines, *_jobs(jobs[: _some(len(jobs) + look.jobs.hidden, room)], look, watch, layout.to)]


def ordered(jobs: Sequence[JobRow], watch: Watch, order: Order) -> list[JobRow]:
    """By turn as they come; else the oldest, the longest or the fastest first."""
    if order == "age":
        return sorted(jobs, key=lambda job: -job.age_ms)
    if order == "tokens":
        return sorted(jobs, key=lambda job: -job.tokens)
    if order == "rate":
        return sorted(jobs, key=lambda job: -(watch.job(job) or 0.0))
    return list(jobs)


def as_json(look: Look, watch: Watch, order: Order) -> dict[str, Any]:
    """Everything that the screen is made of."""
    view, jobs = look.queue, look.jobs
    counts = {name: getattr(jobs, name) for name in ("held", "orphaned", "released", "waiting", "delayed")}
    workers = [{**msgspec.structs.asdict(row), **_asdict(watch.worker(row.name))} for row in look.workers]
    rows = [
        {**msgspec.structs.asdict(job), "tokens_per_second": _rounded(watch.job(job))}
        for job in ordered(jobs.jobs, watch, order)
    ]
    live = {"running_tokens_per_second": _rounded(watch.running())}
    rates = {**_asdict(watch.all()), **live, "hit_rate_total": _rounded(watch.hit_rate_total())}
    about = {"queue": view.queue, "now_ms": look.now_ms, "dead": view.dead, "problems": view.problems}
    return {**about, **counts, **rates, "workers": workers, "jobs": rows}


def _asdict(rates: Rates) -> dict[str, float | None]:
    return {name: _rounded(value) for name, value in msgspec.structs.asdict(rates).items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _head(look: Look, watch: Watch) -> list[tuple[str, str | Cell | None]]:
    view, jobs, rates, total = look.queue, look.jobs, watch.all(), watch.hit_rate_total()
    oldest = max((row.oldest_ms for row in view.priorities if row.oldest_ms is not None), default=None)
    waiting = f"{jobs.waiting:,} waiting" + (f", the oldest for {duration(oldest)}" if oldest is not None else "")
    rare = {"orphaned": jobs.orphaned, "released": jobs.released, "delayed": jobs.delayed, "dead": view.dead}
    engines = [row.engine for row in look.workers if row.state == "alive" and row.engine]
    silent = sum(row.state != "alive" for row in look.workers)
    alive = f"{view.workers_alive:,} alive" + (f", {silent:,} silent or gone" if silent else "")
    return [
        ("queue", view.queue),
        ("workers", Cell(alive, None if view.workers_alive else "red")),
        ("jobs", f"{jobs.held - jobs.orphaned:,} running, {waiting}"),
        *((name, Cell(f"{count:,}", "yellow")) for name, count in rare.items() if count),
        ("tokens/s", f"{speed(watch.running())} of the running jobs; {_rates(rates)} by the last heartbeats"),
        ("hit rate", f"{_percent(rates.hit_rate)} of the last minute, {_percent(total)} since the workers' start"),
        ("kv cache", _kv(engines)),
        *(("problem", Cell(problem, "red")) for problem in view.problems),
    ]


def _rates(rates: Rates) -> str:
    return f"{speed(rates.tokens_per_second)} out and {speed(rates.prompt_tokens_per_second)} of prompts"


def _kv(engines: list[EngineView]) -> str | None:
    blocks = sum(engine.blocks for engine in engines)
    if not blocks:
        return None
    live = sum(engine.blocks_live for engine in engines)
    full = round(BAR * min(live, blocks) / blocks)
    sequences = (
        f"{sum(e.running for e in engines):,} sequences in it, {sum(e.waiting for e in engines):,} wait for room"
    )
    return f"{'█' * full}{'░' * (BAR - full)} {_percent(live / blocks)}, {sequences}"


def _rows_for_workers(layout: Layout, head: int, count: int) -> int:
    """A third of what the head leaves, or all if they are few."""
    if layout.height is None:
        return min(count, MOST_WORKERS)
    return max(LEAST_ROWS, (layout.height - head) // 3)


def _some(count: int, room: int) -> int:
    """How many of `count` rows are shown where there is room for so many lines: one is for how many are not."""
    return count if count <= room else max(LEAST_ROWS, room - 1)


def _workers(shown: Sequence[WorkerRow], count: int, watch: Watch, to: Page) -> list[str]:
    if not shown:
        return [to.paint("no workers", "red")]
    rest = [f"… and {count - len(shown):,} more"] if count > len(shown) else []
    return [*to.table(WORKER_COLUMNS, [_worker_row(row, watch.worker(row.name)) for row in shown]), *rest]


def _worker_row(row: WorkerRow, rates: Rates) -> list[str | Cell]:
    engine = row.engine if row.state == "alive" else None
    return [
        row.name,
        Cell(row.state, STATE_COLOURS[row.state]),
        f"{row.jobs}/{row.capacity}" if row.capacity else str(row.jobs),
        speed(rates.tokens_per_second),
        speed(rates.prompt_tokens_per_second),
        _percent(rates.hit_rate),
        _percent(engine.blocks_live / engine.blocks if engine and engine.blocks else None),
        duration(row.heartbeat_ms),
        duration(row.up_ms),
        row.device or NOTHING,
    ]


def _jobs(shown: Sequence[JobRow], look: Look, watch: Watch, to: Page) -> list[str]:
    hidden = look.jobs.hidden + len(look.jobs.jobs) - len(shown)
    rest = [f"… and {hidden:,} more"] if hidden else []
    return [*job_table(to, shown, watch.job), *rest] if shown else []


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"
