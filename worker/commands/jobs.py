"""The commands of a producer: submit, tail and cancel. They need nothing but `pip install gllm`."""

import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from worker.commands.access import connected
from worker.commands.options import setting_options
from worker.commands.screen import json_option
from worker.commands.silence import replies
from worker.terminal import json_line, one_line, visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gllm.reply import Reply

PROMPTS = ("prompt", "messages", "token_ids")
INTERRUPTED = 130  # the shell's status of a program that Ctrl-C ended


@click.command("submit")
@click.argument("prompt", required=False)
@setting_options("redis", "queue")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message, through the model's chat template.")
@click.option("--system", help="A system message before it; implies --chat.")
@click.option("--max-tokens", type=int, help="Most tokens of the reply; default: up to the model's limit.")
@click.option("--temperature", type=float, help="0 is greedy; default: 1.")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--set", "fields", multiple=True, metavar="NAME=JSON", help="Any other field of a job, like min_p=0.1.")
@click.option("--id", "job_id", help="The job's id; default: a random one. A queue takes an id once.")
@click.option("--priority", default="normal", show_default=True, help="high, normal or low.")
@click.option("--affinity", help="Jobs that share this go to one shard.")
@click.option("--tenant", help="Whose job it is; the prefix cache does not cross tenants.")
@click.option(
    "--wait-replicas", type=click.IntRange(0), default=0, help="Wait until so many replicas of Redis have it."
)
@click.option("--detach", is_flag=True, help="Print the job's id and leave.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per event instead of text.")
def submit_command(
    prompt: str | None, redis: str | None, queue: str | None, detach: bool, as_json: bool, **given: Any
) -> NoReturn:
    """Add a job and stream its reply. PROMPT is its text; - reads standard input."""
    from gllm.validate import job_from

    routing = {name: given.pop(name) for name in ("priority", "affinity", "tenant", "wait_replicas")}
    job_id, fields = given.pop("job_id"), _job_fields(prompt, **given)
    with connected(redis, queue) as client:
        submitted = client.submit(job_from(**fields), id=job_id, **routing)
        if detach:
            click.echo(submitted)
            sys.exit(0)
        click.echo(f"job {submitted}", err=True)
        sys.exit(follow(replies(client, submitted, "0-0", redis, queue), submitted, "0-0", as_json))


def _job_fields(
    prompt: str | None, chat: bool, system: str | None, fields: tuple[str, ...], stop: tuple[str, ...], **sampling: Any
) -> dict[str, Any]:
    job = {name: value for name, value in sampling.items() if value is not None}
    job.update(map(_field, fields))
    if stop:
        job["stop"] = list(stop)
    text = _standard_input() if prompt == "-" else prompt
    if text is None:
        if job.keys().isdisjoint(PROMPTS):
            raise click.UsageError("PROMPT expected: a text, or - for standard input")
        return job
    if not chat and system is None:
        return {**job, "prompt": text}
    before = [] if system is None else [{"role": "system", "content": system}]
    return {**job, "messages": [*before, {"role": "user", "content": text}]}


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"standard input is no UTF-8: {error}") from None


def _field(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        raise click.UsageError(f"--set: NAME=JSON expected, got {text!r}") from None


@click.command("tail", short_help="Stream the reply of a job that was submitted before.")
@click.argument("job_id", metavar="ID")
@setting_options("redis", "queue")
@click.option("--from", "last_id", default="0-0", help="Go on behind this entry of the reply; default: its beginning.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per event instead of text.")
def tail_command(job_id: str, redis: str | None, queue: str | None, last_id: str, as_json: bool) -> NoReturn:
    """Stream the reply of a job that was submitted before, as far as it is written and then live."""
    with connected(redis, queue) as client:
        sys.exit(follow(replies(client, job_id, last_id, redis, queue), job_id, last_id, as_json))


@click.command("cancel")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@setting_options("redis", "queue")
@json_option
def cancel_command(job_ids: tuple[str, ...], redis: str | None, queue: str | None, as_json: bool) -> NoReturn:
    """End jobs early. What they have written stays readable. Exit status 1 if one had ended already."""
    with connected(redis, queue) as client:
        wished = {job_id: client.cancel(job_id) for job_id in job_ids}
    if as_json:
        click.echo(json_line([{"id": job_id, "cancelling": wish} for job_id, wish in wished.items()]))
    else:
        told = (f"{job_id}: {'cancelling' if wish else 'had ended already'}" for job_id, wish in wished.items())
        click.echo("\n".join(told))
    sys.exit(0 if all(wished.values()) else 1)


def follow(events: "Iterable[Reply]", job_id: str, last_id: str, as_json: bool) -> int:
    """Writes the events of a reply to the terminal as they come; the exit status: 0 when the model ended it."""
    ended, entry = "", last_id
    try:
        for reply in events:
            entry = reply.entry
            # else click takes out of a pipe what looks like a colour
            click.echo(_line(reply) if as_json else visible(reply.text), nl=as_json, color=True)
            ended = _ending(reply) or ended
    except KeyboardInterrupt:
        click.echo(f"\ninterrupted; the job goes on. Read on: gllm tail {job_id} --from {entry}", err=True)
        return INTERRUPTED
    if not as_json:
        click.echo()
    if ended not in ("stop", "length", ""):
        click.echo(f"Error: job {job_id}: {one_line(ended)}", err=True)
        return 1
    return 0


def _ending(reply: "Reply") -> str:
    from gllm.protocol import Done, Error

    if isinstance(reply.event, Error):
        return f"{reply.event.code}: {reply.event.message}"
    return reply.event.finish_reason if isinstance(reply.event, Done) else ""


def _line(reply: "Reply") -> str:
    return json_line({"entry": reply.entry, "event": reply.event})
