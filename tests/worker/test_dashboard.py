"""The Grafana dashboard: panels ask only for series that a worker has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.metrics import Metrics

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards" / "gllm.json"


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text())["panels"]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))


def series() -> set[str]:
    metrics = Metrics()
    return set(re.findall(r"^(?:# TYPE )?(gllm_\w+)", metrics.render().decode(), re.MULTILINE))


@pytest.mark.parametrize(("title", "expression"), [pytest.param(*found, id=found[1]) for found in expressions()])
def test_a_panel_asks_for_series_that_exist(title: str, expression: str) -> None:
    asked = set(re.findall(r"gllm_\w+", expression))
    assert asked
    assert asked <= series(), f"panel {title!r}"


def test_the_hit_rate_has_a_panel() -> None:
    expected = "rate(gllm_prefix_cache_hit_tokens_total[5m]) / rate(gllm_prefix_cache_prompt_tokens_total[5m])"
    assert expected in [expression for title, expression in expressions() if title == "Hit rate"]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    squares: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        mine = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not mine & squares, f"panel {panel['title']!r} covers another"
        assert max(x for x, _ in mine) < 24
        squares |= mine
