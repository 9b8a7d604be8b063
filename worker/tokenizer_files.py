"""What a model's files say about its tokenizer: an HF directory is read here, a GGUF file in gguf_tokenizer.py."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from worker.models import ModelError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the name in transformers 5, and the one before
DEFAULT_TEMPLATE = "default"


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer and what belongs to it. `named_tokens`: what a chat template may use, by name (bos_token, …)."""

    backend: tokenizers.Tokenizer
    named_tokens: dict[str, str] = field(default_factory=dict)
    eos_ids: frozenset[int] = frozenset()
    chat_templates: dict[str, str] = field(default_factory=dict)


def read_directory(path: Path) -> TokenizerFiles:
    """Read the tokenizer of an HF directory. Raises ModelError naming the file that is missing or wrong."""
    backend = _read_backend(path / "tokenizer.json")
    config = _read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(path / "special_tokens_map.json")  # how these tokens were named before 2023
    _add_listed(backend, config.get("added_tokens_decoder") or {}, path / "tokenizer_config.json")
    named, extra = _named_tokens(config), _extra_tokens(config)
    _mark_special(backend, [*named.values(), *extra])
    end = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return TokenizerFiles(
        backend=backend,
        named_tokens=named,
        eos_ids=frozenset() if end is None else frozenset({end}),
        chat_templates=_read_templates(path, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(f"{path}: missing; a model directory needs its tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
        raise ModelError(f"{path}: not a tokenizer: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: an object was expected, got {type(content).__name__}")
    return content


def _content(token: Any) -> str | None:
    """Tokens are written as strings or as objects with their content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The standard names, then a model's own (`image_token`, …), as templates see them."""
    own = [name for name in config if name.endswith("_token") and isinstance(config[name], str)]
    values = {name: config.get(name) for name in dict.fromkeys([*NAMED, *own])}
    if isinstance(extra := config.get(EXTRA[0]), dict):
        values |= extra
    return {name: content for name, value in values.items() if (content := _content(value)) is not None}


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    listed = [token for name in EXTRA if isinstance(config.get(name), list) for token in config[name]]
    return [content for token in listed if (content := _content(token)) is not None]


def _add_listed(backend: tokenizers.Tokenizer, listed: Any, source: Path) -> None:
    """Add the tokens that the tokenizer.json has not, by rising id, or has with other switches: the config's count.

    What the tokenizer.json calls special stays special: the library never forgets that.
    """
    added = backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    try:
        numbers = {int(number): token for number, token in listed.items()}
        tokens = [tokenizers.AddedToken(**numbers[number]) for number in sorted(numbers)]
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{source}: added_tokens_decoder: tokens by their ids expected: {error}") from error
    for token in tokens:
        token.special = token.special or token.content in special
    known = set(map(repr, added))  # not as tokens: those of equal text are equal, whatever their switches
    backend.add_tokens([token for token in tokens if repr(token) not in known])


def _mark_special(backend: tokenizers.Tokenizer, contents: list[str]) -> None:
    """What the config calls special is, also where the tokenizer.json forgot; a name alone invents no token."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    missing: list[tokenizers.AddedToken] = []
    for content in dict.fromkeys(contents):
        token = added.get(content, tokenizers.AddedToken(content, normalized=False))
        if backend.token_to_id(content) is not None and not token.special:
            token.special = True
            missing.append(token)
    backend.add_tokens(missing)


def _read_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own win over the tokenizer's config, and that over chat_template.json."""
    files = {DEFAULT_TEMPLATE: path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    found = {name: _read_template(file) for name, file in files.items() if file.is_file()}
    if found:
        return found
    if (inside := config.get("chat_template")) is not None:
        return templates_of(inside, path / "tokenizer_config.json")
    file = path / "chat_template.json"
    return templates_of(_read_json(file).get("chat_template"), file)


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not a text: {error}") from error


def templates_of(value: Any, source: Path) -> dict[str, str]:
    """Templates as configs write them: none, one string, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    items = value if isinstance(value, list) else [value]
    named = [(item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None) for item in items]
    if not all(isinstance(part, str) for pair in named for part in pair):
        raise ModelError(f"{source}: chat_template: text or named templates expected, got {value!r}")
    return {str(name): str(template) for name, template in named}
