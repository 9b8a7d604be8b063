"""Text that is to be shown to people."""

import sys

_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_SYMBOLS |= dict.fromkeys(range(128, 160), 65533)


def visible(text: str) -> str:
    """A model's text for a terminal: control characters, which could steer it, are shown as symbols."""
    return text.translate(_SYMBOLS) if sys.stdout.isatty() else text
