"""Text that is to be shown to people, and JSON that may end up before their eyes."""

import re
import sys

import msgspec

_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_SYMBOLS |= dict.fromkeys(range(128, 160), 65533)
_EVERY_SYMBOL = {**_SYMBOLS, ord("\n"): 0x240A, ord("\t"): 0x2409}
_RAW_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")  # JSON escapes only what is below 0x20


def visible(text: str) -> str:
    """A model's text for a terminal: control characters, which could steer it, are shown as symbols."""
    return text.translate(_SYMBOLS) if sys.stdout.isatty() else text


def one_line(text: str) -> str:
    """Anybody's text for a table or a message, wherever that goes: one line in which every character can be seen."""
    text = text.translate(_EVERY_SYMBOL)
    return text if text.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in text)


def json_line(value: object) -> str:
    """One line of JSON that no terminal takes for a command: control and direction characters are escaped."""
    return _RAW_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", msgspec.json.encode(value).decode())
