"""Reading the pages of docs/: their tables by heading, and their code blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Page:
    """One Markdown page. A section is what stands under a heading, up to the next one of whatever level."""

    def __init__(self, name: str) -> None:
        self.text = (ROOT / name).read_text()
        prose = re.sub(r"^```.*?^```$", "", self.text, flags=re.DOTALL | re.MULTILINE)
        parts = re.split(r"^#+ (.*)$", prose, flags=re.MULTILINE)
        self.sections = dict(zip(parts[1::2], parts[2::2], strict=True))

    def blocks(self, language: str) -> list[str]:
        """The fenced code blocks in one language."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE)

    def table(self, heading: str, number: int = 0) -> dict[str, list[str]]:
        """A table of a section: the other cells of each row by its first one, without its backticks."""
        tables = re.findall(r"(?:^\|.*\n)+", self.sections[heading], re.MULTILINE)
        rows = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in tables[number].splitlines()]
        return {row[0].strip().strip("`"): row[1:] for row in rows[2:]}


def codes(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)
