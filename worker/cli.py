"""The command `gllm`. What a command needs is imported when it runs: a producer has neither torch nor structlog."""

import errno
import sys
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from worker.commands.bench import bench_command
from worker.commands.dead import dead_group
from worker.commands.doctor import doctor_command
from worker.commands.jobs import INTERRUPTED, cancel_command, submit_command, tail_command
from worker.commands.look import ps_command, queue_command
from worker.commands.options import need_extra, resolved, setting_options
from worker.commands.show import show_command
from worker.commands.top import top_command
from worker.terminal import one_line


class Commands(click.Group):
    """All commands. Ctrl-C ends each of them without a word, a full disk with a line, unless it has its own to say."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # `… | head`: click knows how to leave then
            raise click.ClickException(one_line(str(error))) from None


@click.group("gllm", cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="gllm", prog_name="gllm")
def main() -> None:
    """LLM generation over Redis: workers take jobs from a queue and write each reply to a stream of its own."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a model writes what a terminal's encoding may not have


@main.command("worker")
@setting_options()
@click.option("--print-config", is_flag=True, help="Show every setting, and where its value came from; start nothing.")
def worker_command(print_config: bool, **flags: Any) -> None:
    """Serve a queue until SIGTERM. A flag wins over its variable, a variable over the default."""
    result = resolved(flags)
    if print_config:
        click.echo("\n".join(result.lines()))
        return
    need_extra("gllm worker", "worker")
    from engine import early
    from worker import logs

    settings = result.settings
    early.begin(settings.device, settings.dtype, settings.kernels)
    logs.configure(settings.log_format, settings.log_level)
    from worker.service import run  # after the logs: what these imports warn of is to be JSON as well

    sys.exit(run(settings))


@main.command("demo", short_help="Eight chats at once on a small real model.")
@setting_options("model", "device", "dtype")
@click.option(
    "--redis", "redis_url", help="A Redis to use; default: an embedded one.  [env: GLLM_REDIS, GLLM_REDIS_URL]"
)
@click.option("--max-tokens", type=click.IntRange(1), default=48, show_default=True, help="Most tokens of each reply.")
@click.option("--plain", is_flag=True, help="Plain lines also on a terminal.")
def demo_command(redis_url: str | None, max_tokens: int, plain: bool, **flags: Any) -> NoReturn:
    """Eight chats at once on a small real model: streamed live, then a table. Needs nothing running."""
    result = resolved({**flags, "redis": redis_url}, "model", "device", "dtype", "redis")
    need_extra("gllm demo", "worker")
    from worker.demo import DemoOptions, run

    own_redis = result.sources["redis"] != "default"
    settings = result.settings
    sys.exit(
        run(
            DemoOptions(
                model=settings.model,
                device=settings.device,
                dtype=settings.dtype,
                redis=settings.redis if own_redis else None,
                max_tokens=max_tokens,
                plain=plain,
            )
        )
    )


for command in (submit_command, tail_command, cancel_command):
    main.add_command(command)
for command in (ps_command, queue_command, top_command, show_command, dead_group, doctor_command, bench_command):
    main.add_command(command)

if __name__ == "__main__":
    main()
