"""A benchmark of several sections: which ones are asked for, and what is shown and written of them in the end."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from benchmarks.figure import Figure, as_json

Where = Mapping[str, str | int | float]
Results = Mapping[str, list[Figure]]


def chosen(titles: Mapping[str, str]) -> Callable[[str], list[str]]:
    """Reads an option like a,b,c: names of sections, in the sections' own order."""

    def sections(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(titles):
            raise argparse.ArgumentTypeError(f"some of {', '.join(titles)} expected, got {text!r}")
        return [name for name in titles if name in names]

    return sections


def measured(titles: Mapping[str, str], works: Mapping[str, Callable[[], list[Figure]]]) -> dict[str, list[Figure]]:
    """One section after the other; says on standard error how far it is."""
    results: dict[str, list[Figure]] = {}
    for section, work in works.items():
        results[section] = work()
        print(f"{titles[section]}: done", file=sys.stderr)
    return results


def conclude(options: argparse.Namespace, titles: Mapping[str, str], where: Where, results: Results) -> NoReturn:
    """Show the figures, write them where --json says, and end: with 1 if --check is given and a mark is not met."""
    report = {"environment": where, "results": {name: as_json(figures) for name, figures in results.items()}}
    text = json.dumps(report, indent=1)
    if options.json == "-":
        print(text)
    else:
        _show(titles, where, results)
    if options.json and options.json != "-":
        Path(options.json).write_text(text + "\n")
    sys.exit(1 if options.check and not all(f.met for figures in results.values() for f in figures) else 0)


def _show(titles: Mapping[str, str], where: Where, results: Results) -> None:
    for name, value in where.items():
        print(f"{name:>14}  {value}")
    for section, figures in results.items():
        print(f"\n{titles[section]}")
        print("\n".join(figure.line() for figure in figures))
