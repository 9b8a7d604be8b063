"""What a chat template may use: the environment of transformers' `apply_chat_template`, without its randomness.

(trim_blocks, lstrip_blocks, loop controls, `tojson` without HTML escaping, `raise_exception`, `strftime_now`,
`namespace`, `dict`, `{% generation %}`.) Jinja's sandbox keeps a template from Python's internals, but not from endless
loops, nor from values that grow without end: no check inside the language finds all of those, so foreign templates are
rendered in a process whose time and memory the kernel bounds (worker/renderer.py).
"""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDERED = 16 * 1024 * 1024  # characters: four times the largest job body


class TemplateFailed(Exception):
    """The template refused the messages, failed on them, or went beyond its limits. The message says which."""


def check(source: str) -> None:
    """Raise jinja2.TemplateSyntaxError, or RecursionError, for what is no template. Runs nothing of it."""
    _Sandbox(optimized=False).compile(source)


class Template:
    """One compiled chat template. `source` may do anything: see the module's first lines."""

    def __init__(self, source: str) -> None:
        self._code = _Sandbox().compile(source)

    def render(self, variables: dict[str, Any], now: datetime) -> str:
        """What the template writes for these variables. Raises TemplateFailed."""
        sandbox = _Sandbox()  # one for each rendering: they share nothing
        template = jinja2.Template.from_code(sandbox, self._code, sandbox.globals)
        return _joined(template.generate(**variables, strftime_now=now.strftime))


def render(source: str, variables: dict[str, Any], now: datetime, known: dict[str, Template] | None = None) -> str:
    """Compile, unless `known` has the template already, and render. Raises TemplateFailed, whatever goes wrong."""
    known = {} if known is None else known
    try:
        if source not in known:
            known[source] = Template(source)
        return known[source].render(variables, now)
    except TemplateFailed:
        raise
    except Exception as error:  # a template is foreign code and may raise anything; the job is what fails
        reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise TemplateFailed(f"failed: {reason[:1000]}") from error


def _joined(parts: Iterable[str]) -> str:
    kept: list[str] = []
    length = 0
    for part in parts:
        kept.append(part)
        length += len(part)
        if length > MAX_RENDERED:
            raise TemplateFailed(f"wrote more than {MAX_RENDERED} characters")
    return "".join(kept)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _PlainNamespace(Namespace):
    """The one thing that a template can change in a loop. Names with an underscore belong to Python."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace with the name {name!r}")
        super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained on; for a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and the kind that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    def __init__(self, optimized: bool = True) -> None:
        extensions = [_Generation, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=optimized)
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "namespace": _PlainNamespace}
        del self.globals["lipsum"], self.filters["random"]  # a job that another worker takes over must read the same
