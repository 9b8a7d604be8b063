"""Click options out of the table of settings, and the errors that a command can end with: one line each."""

import importlib.util
import json
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from worker.config import OPTIONS, Option, Resolved, Settings, SettingsError, resolve

EXTRAS = {
    "worker": ("torch", "safetensors", "tokenizers", "jinja2", "prometheus_client", "structlog", "gguf"),
    "bench": ("matplotlib",),
}

Command = TypeVar("Command", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A number in a range. Python's own reading of one takes `nan`, which no range leaves out, and `inf`."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"a finite number expected, got {value!r}", param, ctx)
        return number


class BadSetting(click.ClickException):
    exit_code = 2  # as for any wrong use of a command


def setting_options(*names: str) -> Callable[[Command], Command]:
    """Click options from the table of settings: the named ones, or all."""
    chosen = [option for option in OPTIONS if not names or option.name in names]

    def decorate(command: Command) -> Command:
        for option in reversed(chosen):
            command = _click_option(option)(command)
        return command

    return decorate


def _click_option(option: Option) -> Callable[[Command], Command]:
    default = Settings.__struct_defaults__[Settings.__struct_fields__.index(option.name)]
    shown = "" if default is None else f"default: {json.dumps(default).strip(chr(34))}; "
    text = f"{option.help}  [{shown}env: {', '.join(option.variables)}]"
    if option.switch:
        return click.option(f"{option.flag}/--no-{option.flag[2:]}", default=None, help=text)
    bare: dict[str, Any] = {"is_flag": False, "flag_value": option.bare} if option.bare else {}
    return click.option(option.flag, default=None, type=str, help=text, **bare)


def resolved(flags: dict[str, Any], *names: str) -> Resolved:
    """The settings, or a usage error that names flag or variable and value."""
    try:
        return resolve(flags, os.environ, [option for option in OPTIONS if not names or option.name in names])
    except SettingsError as error:
        raise BadSetting(str(error)) from None


def need_extra(command: str, extra: str) -> None:
    """Raises a one-line error with the pip command when a package of the extra is missing. Imports nothing."""
    missing = [name for name in EXTRAS[extra] if not _installed(name)]
    if missing:
        raise click.ClickException(f"{command} needs {', '.join(missing)}: pip install 'gllm[{extra}]'")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
