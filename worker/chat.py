"""Chat messages to token ids, as the model's authors meant: their Jinja template, rendered in a sandbox.

The environment is that of transformers' `apply_chat_template` (trim_blocks, lstrip_blocks, loop controls, `tojson`
without HTML escaping, `raise_exception`, `strftime_now`, `{% generation %}`), so the ids are equal. Two things differ
on purpose: what messages say is never read as a control token, and the date is the job's, so a job keeps its prompt.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
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

from worker.control import Hiding, PromptError, map_strings
from worker.models import ModelError
from worker.tokenizer import PLACEHOLDERS, Tokenizer

MAX_RENDERED = 16 * 1024 * 1024  # characters: four times the largest job body
MAX_NUMBER = 10_000_000  # no template counts further; a width or a repetition beyond it is an attack on our memory
MAX_SECONDS = 5.0  # rendering a body of 4 MiB takes well under one

Messages = Sequence[dict[str, Any]]


class ChatFailed(PromptError):
    """The template refused the messages, failed on them, or went beyond its limits."""


class ChatTemplate:
    """One compiled chat template. Raises ModelError when it is no valid Jinja."""

    def __init__(self, source: str) -> None:
        try:
            self._code = _Sandbox().compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat_template: line {error.lineno}: {error.message}") from error

    def render(self, messages: Messages, names: dict[str, str], now: datetime) -> str:
        """The prompt of a conversation, with the header of the reply to come. Raises ChatFailed."""
        sandbox = _Sandbox()
        template = jinja2.Template.from_code(sandbox, self._code, sandbox.globals)
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {**names, "messages": chat, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return _bounded(template.generate(**variables, strftime_now=now.strftime))
        except ChatFailed:
            raise
        except Exception as error:  # a template is foreign code and may raise anything; the job is what fails
            reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise ChatFailed(f"the chat template failed: {reason}") from error


def encode_chat(tokenizer: Tokenizer, template: ChatTemplate, messages: Messages, now: datetime) -> list[int]:
    """The ids of a conversation. Strings in the messages that spell control tokens are encoded as plain text.

    Raises PromptError, also for a job that spells more different ones than there are placeholders.
    """
    control, names = tokenizer.control, tokenizer.named_tokens
    whole, chat = _hide(messages, control.spans)
    text = template.render(chat, names, now)
    if control.begins_in(chat):
        # Beginnings of control tokens are left, and a template that cuts and joins could complete one. So see what it
        # writes when even the beginnings are hidden: the same control tokens, or else that is the prompt.
        parts, apart = _hide(messages, control.beginnings)
        safe = template.render(apart, names, now)
        if control.found(text) != control.found(safe):
            return tokenizer.encode_guarded(safe, parts.hidden)
    return tokenizer.encode_guarded(text, whole.hidden)


def _hide(messages: Messages, spans: Callable[[str], Iterable[tuple[int, int]]]) -> tuple[Hiding, Messages]:
    hiding = Hiding(PLACEHOLDERS)
    return hiding, map_strings(messages, lambda text: hiding.hide(text, spans(text)))


def _bounded(parts: Any) -> str:
    kept: list[str] = []
    length = 0
    for part in parts:
        kept.append(part)
        length += len(part)
        if length > MAX_RENDERED:
            raise ChatFailed(f"the chat template wrote more than {MAX_RENDERED} characters")
    return "".join(kept)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _check_size(value: Any) -> None:
    """Refuse what a template could grow without end, before it is used once more."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise SecurityError(f"a number beyond {MAX_NUMBER}")
    if isinstance(value, str | list | tuple | dict) and len(value) > MAX_RENDERED:
        raise SecurityError(f"a value of more than {MAX_RENDERED} elements")


def _repeated(value: Any, count: Any) -> int:
    """How many elements `value * count` has, when that is a repetition."""
    return len(value) * count if isinstance(value, str | list | tuple) and isinstance(count, int) else 0


class _SmallNamespace(Namespace):
    """The one thing that a template can change in a loop. Names with an underscore belong to Python."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace with the name {name!r}")
        _check_size(value)
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
    """An environment for one rendering. Its clock runs out, and neither numbers nor strings grow without end."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "namespace": _SmallNamespace}
        del self.globals["lipsum"]  # random text has no place in a prompt
        self._deadline = time.monotonic() + MAX_SECONDS

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._check_clock()
        for value in (*args, *kwargs.values()):
            _check_size(value)
        return super().call(context, callee, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_clock()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._check_clock()
        for value in (left, right):
            _check_size(value)
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise SecurityError(f"a power of {right}")
        if operator == "*":
            _check_size(_repeated(left, right) + _repeated(right, left))
        return super().call_binop(context, operator, left, right)

    def _check_clock(self) -> None:
        if time.monotonic() > self._deadline:
            raise ChatFailed(f"the chat template took more than {MAX_SECONDS:g} seconds")
