"""What `gllm bench` does with its options: a plan of jobs, the run, and what is written afterwards."""

import asyncio
import os
import platform
import secrets
import signal
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import click
from msgspec import Struct
from redis.exceptions import NoPermissionError

from worker.commands.access import inspected, one_line_errors
from worker.commands.bench_page import Progress, printed
from worker.humane import counted
from worker.inspection.inspector import Inspector
from worker.load import arrivals
from worker.load.figures import Figures, figures, job_rows
from worker.load.run import Load, Options
from worker.load.traces import read_trace
from worker.load.work import Drawn, Prefix, Shape, Span, Traced, Vocabulary, Work, timed
from worker.terminal import json_line, one_line

FAILED, INTERRUPTED = 1, 130
DEFAULT_JOBS, DEFAULT_RATE = 100, 1.0
IDS = Vocabulary(1000, 16_000)  # control tokens are the first or the last ids of all tokenizers that we know
DRAW_SECONDS = 0.2

Given = dict[str, Any]


class Facts(Struct, frozen=True, kw_only=True):
    """What the queue's workers say of themselves; None where nobody says it."""

    workers: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    server: dict[str, Any] = {}
    each: list[dict[str, Any]] = []


def bench(url: str, queue: str, given: Given) -> int:
    """Runs the load; the exit status. What the outside can cause is a one-line error."""
    facts = _facts(url, queue)
    shape = _shape(given)
    jobs = _jobs(given, shape)
    _refuse_too_long(shape, facts)
    load = Load(_options(url, queue, given, facts, jobs), _work(given, shape))
    if facts.workers == 0:
        click.echo(f"no worker is alive in queue {queue}: jobs will wait", err=True)
    with one_line_errors(url):
        asyncio.run(_run(load, jobs))
    found = figures(load.records, load.began, load.finished)
    if str(given["json_path"]) != "-":
        click.echo(printed(load, found))
    _write(load, found, given, facts)
    if load.interrupted:
        return INTERRUPTED
    return 0 if found.well == found.jobs else FAILED


async def _run(load: Load, jobs: int | None) -> None:
    """With Ctrl-C (and SIGTERM) as a wish to end, and a line of progress."""
    loop, progress = asyncio.get_running_loop(), Progress(load, jobs)

    def interrupt() -> None:
        if load.stop.is_set():
            load.hurry.set()
        else:
            load.stop.set()
            progress.clear()
            click.echo(f"cancelling {counted(load.open, 'job')}; Ctrl-C again leaves at once", err=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    drawing = asyncio.create_task(_draw(progress))
    try:
        await load.run()
    finally:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
        progress.clear()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _draw(progress: Progress) -> None:
    while True:
        await asyncio.sleep(DRAW_SECONDS)
        progress.show()


def _shape(given: Given) -> Shape:
    path = given["trace"]
    if path is None:
        _refuse(given, {"arrival": "trace", "scale": None, "speed": None}, "needs --trace")
        return _drawn(given)
    try:
        requests = read_trace(path)
    except (OSError, ValueError) as error:
        raise click.ClickException(one_line(str(error))) from None
    return Traced(requests[: given["jobs"]], given["scale"], given["speed"])


def _refuse(given: Given, options: dict[str, Any], why: str) -> None:
    """Options that mean nothing without another: those that have the value, or with None not their default."""
    for name, value in options.items():
        if given[name] == value if value is not None else given[name] != 1.0:
            raise click.UsageError(f"--{name} {given[name]} {why}")


def _drawn(given: Given) -> Drawn:
    prompt, output = Span(*given["prompt_tokens"]), Span(*given["max_tokens"])
    shared = given["shared_prefix"]
    if shared >= prompt.low:
        raise click.UsageError(f"--shared-prefix {shared} leaves nothing of --prompt-tokens {prompt.low}")
    return Drawn(prompt, output, Prefix(shared, given["groups"]), given["seed"])


def _jobs(given: Given, shape: Shape) -> int | None:
    """How many there will be; None where only the time ends it."""
    if isinstance(shape, Traced):
        return len(shape.requests)
    return given["jobs"] or (None if given["duration"] else DEFAULT_JOBS)


def _work(given: Given, shape: Shape) -> Iterator[Work]:
    arrival = given["arrival"] or ("trace" if isinstance(shape, Traced) and given["rate"] is None else "poisson")
    if given["clients"] is not None:
        if given["rate"] is not None or given["arrival"] is not None:
            raise click.UsageError("--clients excludes --rate and --arrival: a client submits when it is free")
        return shape.work()
    if arrival == "trace":
        if given["rate"] is not None:
            raise click.UsageError("--arrival trace excludes --rate: --speed hurries a trace")
        return shape.work()
    process = {"poisson": arrivals.poisson, "constant": arrivals.constant, "bursts": arrivals.bursts(given["burst"])}
    return timed(shape.work(), process[arrival], given["rate"] or DEFAULT_RATE, given["seed"])


def _refuse_too_long(shape: Shape, facts: Facts) -> None:
    if facts.context is not None and shape.longest > facts.context:
        longest = f"the longest job has {shape.longest:,} tokens with its reply"
        fits = 0.99 * facts.context / shape.longest
        advice = f": try --scale {fits * shape.scale:.2g}" if isinstance(shape, Traced) else ""
        raise click.ClickException(f"{longest}, the workers' model takes {facts.context:,}{advice}")


def _options(url: str, queue: str, given: Given, facts: Facts, jobs: int | None) -> Options:
    run = f"bench-{secrets.token_hex(6)}"
    return Options(
        url=url,
        queue=queue,
        run=run,
        seed=given["seed"],
        vocabulary=_vocabulary(given["vocab"], facts),
        clients=given["clients"],
        jobs=jobs,
        seconds=given["duration"],
        timeout=given["timeout"],
        salt=None if given["warm"] else run,
        ignore_eos=not given["stop_at_eos"],
        temperature=given["temperature"],
        priority=given["priority"],
        connections=given["connections"],
    )


def _vocabulary(asked: tuple[int, int] | None, facts: Facts) -> Vocabulary:
    """What was asked for, else ids that are ordinary tokens in a vocabulary of the size that workers tell."""
    if asked is not None:
        return Vocabulary(asked[0], asked[1] + 1)
    size = facts.vocabulary
    return IDS if size is None or size >= IDS.end else Vocabulary(size // 4, max(size // 4 + 1, size * 3 // 4))


def _facts(url: str, queue: str) -> Facts:
    """What a producer may not look at stays unknown; a Redis that is not there is an error."""
    with inspected(url, queue) as inspector:
        inspector.knock()
        with suppress(NoPermissionError):
            return _facts_of(inspector)
    return Facts()


def _facts_of(inspector: Inspector) -> Facts:
    alive = [row for row in inspector.workers() if row.state == "alive"]
    engines = [row.engine for row in alive if row.engine]
    server: dict[str, Any] = {}
    with suppress(NoPermissionError):
        server = cast(dict[str, Any], inspector.redis.info("server"))
    return Facts(
        workers=len(alive),
        vocabulary=min((engine.vocabulary for engine in engines), default=None),
        context=min((engine.context for engine in engines), default=None),
        server={name: server[name] for name in ("redis_version", "valkey_version", "os") if name in server},
        each=[{name: getattr(row, name) for name in ("name", "device", "capacity", "version")} for row in alive],
    )


def _write(load: Load, found: Figures, given: Given, facts: Facts) -> None:
    """The files that were asked for; the table is there already, so a disk that is full loses nothing."""
    try:
        if given["json_path"] is not None:
            _write_json(given["json_path"], _document(load, found, given, facts))
        if given["plot"] is not None:
            from worker.load.plot import plot

            title = f"gllm bench: {counted(found.jobs, 'job')}, {found.tokens_per_second:,.1f} tokens/s"
            plot(given["plot"], title, load.records, found, load.began)
    except OSError as error:
        raise click.ClickException(one_line(str(error))) from None


def _write_json(path: Path, document: dict[str, Any]) -> None:
    line = json_line(document)
    if str(path) == "-":
        click.echo(line)
    else:
        path.write_text(line + "\n", "utf-8")


def _document(load: Load, found: Figures, given: Given, facts: Facts) -> dict[str, Any]:
    """Every figure, and what it was measured with."""
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    ids = load.options.vocabulary
    return {
        "run": load.options.run,
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "interrupted": load.interrupted,
        "options": {**asked, "queue": load.options.queue, "ids": [ids.first, ids.end - 1]},
        "environment": {
            "gllm": version("gllm"),
            "python": platform.python_version(),
            "redis_py": version("redis"),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "server": facts.server,
            "workers": facts.each,
        },
        "figures": found,
        "jobs": job_rows(load.records, load.began),
    }
