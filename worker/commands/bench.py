"""`gllm bench`: a load for a queue, and what its clients got. Speaks to Redis only, as any producer does."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from worker.commands.options import Number, need_extra, resolved, setting_options


class Range(click.ParamType[tuple[int, int]]):
    """A whole number like 64, or a span like 16:256."""

    name = "n[:m]"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(
        self, value: str | tuple[int, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        low, _, high = str(value).partition(":")
        try:
            span = int(low), int(high or low)
        except ValueError:
            span = (1, 0)
        if not self._least <= span[0] <= span[1]:
            self.fail(
                f"a number like 64 or a span like 16:256, from {self._least}, expected, got {value!r}", param, ctx
            )
        return span


class Target(click.Path):
    """A file to be written at the end of a run: what is wrong with its name should be known before."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
        return path


@click.command("bench")
@setting_options("redis", "queue")
@click.option("--jobs", type=click.IntRange(1), help="End after so many jobs; default: 100, or all of the trace.")
@click.option("--duration", type=Number(0, min_open=True), help="Submit for so many seconds.")
@click.option("--rate", type=Number(0, min_open=True), help="Jobs a second that are submitted; default: 1.")
@click.option(
    "--arrival",
    type=click.Choice(["poisson", "constant", "bursts", "trace"]),
    help="When they come; default: poisson, or as in the trace.",
)
@click.option("--burst", type=click.IntRange(1), default=8, show_default=True, help="Jobs of one burst.")
@click.option(
    "--clients", type=click.IntRange(1), help="Instead of a rate: so many clients, each with a job at a time."
)
@click.option("--prompt-tokens", type=Range(1), default="128", show_default=True, help="Length of prompts: N or N:M.")
@click.option("--max-tokens", type=Range(0), default="64", show_default=True, help="Length of replies: N or N:M.")
@click.option("--shared-prefix", type=click.IntRange(0), default=0, help="Tokens that prompts of a group begin with.")
@click.option("--groups", type=click.IntRange(1), default=1, show_default=True, help="Groups with a prefix each.")
@click.option("--trace", type=click.Path(path_type=Path), help="Lengths (and arrivals) of an Azure or Mooncake trace.")
@click.option("--scale", type=Number(0, min_open=True), default=1.0, help="Shortens a trace's lengths: 0.1.")
@click.option("--speed", type=Number(0, min_open=True), default=1.0, help="Hurries a trace's arrivals: 10.")
@click.option("--stop-at-eos", is_flag=True, help="Let the model end replies; default: all have their full length.")
@click.option("--temperature", type=Number(0, 100), default=1.0, show_default=True)
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default="normal", show_default=True)
@click.option("--vocab", type=Range(0), help="Token ids of prompts, FIRST:LAST; default: 1000:15999, or what fits.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of lengths, arrivals and prompts.")
@click.option("--warm", is_flag=True, help="May find in the prefix cache what a run before has left.")
@click.option("--timeout", type=Number(0, min_open=True), default=300.0, help="Give a silent job up: 300 s.")
@click.option("--connections", type=click.IntRange(1, 64), default=4, help="That read replies; default: 4.")
@click.option("--plot", type=Target(), help="Write a picture (PNG); needs the extra `bench`.")
@click.option("--json", "json_path", type=Target(), help="Write every figure and every job; - prints.")
def bench_command(redis: str | None, queue: str | None, **given: Any) -> NoReturn:
    """Submit many jobs, read all replies, and show how long they took. Exit status 1 if a job did not end well.

    An open load (--rate) never waits for replies, and latencies count from when a job was due. Prompts are random token
    ids. Ctrl-C cancels what is open and shows what there is; a second one leaves at once.
    """
    settings = resolved({"redis": redis, "queue": queue}, "redis", "queue").settings
    if given["plot"] is not None:
        need_extra("gllm bench --plot", "bench")
    from worker.commands.bench_run import bench

    sys.exit(bench(settings.redis, settings.queue, given))
