"""`gllm doctor`: what is wrong, and what to do about it."""

import sys
import textwrap
from typing import TYPE_CHECKING, NoReturn

import click

from worker.commands.access import inspected
from worker.commands.options import setting_options
from worker.commands.screen import json_option, page
from worker.commands.tables import Page
from worker.humane import counted
from worker.terminal import json_line, one_line

if TYPE_CHECKING:
    from worker.doctor.doctor import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
WIDEST = 120


@click.command("doctor")
@setting_options("redis", "queue")
@json_option
def doctor_command(redis: str | None, queue: str | None, as_json: bool) -> NoReturn:
    """Look at server and queue, and say what to change. Changes nothing. Exit status 1 if something failed."""
    with inspected(redis, queue) as inspector:
        from worker.doctor.doctor import examine

        findings = examine(inspector)
    failed = sum(finding.status == "fail" for finding in findings)
    if as_json:
        click.echo(json_line(findings))
    else:
        warned = sum(finding.status == "warn" for finding in findings)
        to = page()
        lines = [line for finding in findings for line in _lines(to, finding)]
        click.echo("\n".join([*lines, "", f"{counted(failed, 'failure')}, {counted(warned, 'warning')}"]))
    sys.exit(1 if failed else 0)


def _lines(to: Page, finding: "Finding") -> list[str]:
    """Status, question and answer, and the advice below."""
    head = f"{finding.status:<4}  {finding.check:<16}  "
    margin = " " * len(head)
    found = _wrapped(to, one_line(finding.found), margin)
    lines = [to.paint(f"{finding.status:<4}", COLOURS[finding.status]) + head[4:] + found[0].strip(), *found[1:]]
    return lines + _wrapped(to, f"→ {one_line(finding.advice)}", margin) if finding.advice else lines


def _wrapped(to: Page, text: str, margin: str) -> list[str]:
    width = max(len(margin) + 20, min(to.width or WIDEST, WIDEST))
    return textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False) or [
        margin
    ]
