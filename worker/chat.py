"""Chat messages to token ids, as the model's authors meant: their Jinja template, as transformers renders it.

So the ids are those of `apply_chat_template`. Two things differ on purpose: what messages say is never read as a
control token, and the date is the job's, so a job keeps its prompt.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import jinja2

from worker import sandbox
from worker.control import Hiding, PromptError, map_strings
from worker.models import ModelError
from worker.renderer import Renderer
from worker.tokenizer import PLACEHOLDERS, Tokenizer

REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message's reasoning is called, the usual name first

Messages = Sequence[dict[str, Any]]


class ChatFailed(PromptError):
    """The template refused the messages, failed on them, or went beyond its limits."""


class ChatTemplate:
    """One chat template. Raises ModelError when it is no valid Jinja."""

    def __init__(self, source: str, renderer: Renderer) -> None:
        self._source = source
        self._renderer = renderer
        try:
            sandbox.check(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat_template: line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise ModelError("chat_template: nested too deeply") from error

    def render(self, messages: Messages, names: dict[str, str], now: datetime) -> str:
        """The prompt of a conversation, with the header of the reply to come. Raises ChatFailed."""
        chat = [_as_templates_read_it(message) for message in messages]
        variables = {**names, "messages": chat, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._renderer.render(self._source, variables, now)
        except sandbox.TemplateFailed as error:
            raise ChatFailed(f"the chat template {error}") from error


def render_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Messages, now: datetime
) -> tuple[str, dict[str, str]]:
    """A conversation as `Tokenizer.encode_guarded` takes it: strings in it that spell control tokens stay plain text.

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
            return safe, parts.hidden
    return text, whole.hidden


def _hide(messages: Messages, spans: Callable[[str], Iterable[tuple[int, int]]]) -> tuple[Hiding, Messages]:
    hiding = Hiding(PLACEHOLDERS)
    return hiding, map_strings(messages, lambda text: hiding.hide(text, spans(text)))


def _as_templates_read_it(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what it leaves open, its reasoning under each name that a template may look for."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}
