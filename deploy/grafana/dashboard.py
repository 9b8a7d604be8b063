"""Makes dashboards/gllm.json, which Grafana reads, from panels.toml: `python deploy/grafana/dashboard.py`."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TARGET = FOLDER / "dashboards" / "gllm.json"
CHOSEN = 'job=~"$job", instance=~"$instance"'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24  # of Grafana's grid
ROW, NUMBER, GRAPH = 1, 4, 8  # heights in it

Json = dict[str, Any]


def scoped(query: str) -> str:
    """With the choice of job and workers in every selector."""

    def choose(found: re.Match[str]) -> str:
        own = (found[2] or "{}")[1:-1]
        return f"{found[1]}{{{', '.join(filter(None, (CHOSEN, own)))}}}"

    return re.sub(r"(gllm_\w+)(\{[^}]*\})?", choose, query).replace("[~]", "[$__rate_interval]")


def queries(panel: Json) -> Iterator[tuple[str, str]]:
    """Each query with its legend."""
    if name := panel.get("quantiles"):
        for share in (0.5, 0.95, 0.99):
            yield f"histogram_quantile({share}, sum by (le) (rate({name}_bucket[~])))", f"p{100 * share:.0f}"
    yield from panel.get("queries", [])


def targets(panel: Json) -> Iterator[Json]:
    for letter, (query, legend) in zip("ABCDEF", queries(panel), strict=False):
        expression = query if panel.get("exact") else scoped(query)
        yield {"refId": letter, "datasource": SOURCE, "expr": expression, "legendFormat": legend}


def drawn(panel: Json, number: bool) -> Json:
    """A panel as Grafana has it, but for its place."""
    limits = {"min": 0, **({"max": panel["max"]} if "max" in panel else {})}
    look = {"color": {"mode": "fixed", "fixedColor": "text"}} if number else {"custom": graph(panel)}
    return {
        "type": "stat" if number else "timeseries",
        "title": panel["title"],
        "description": panel["text"],
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.get("unit", "short"), **limits, **look}, "overrides": []},
        "options": NUMBER_OPTIONS if number else GRAPH_OPTIONS,
        "targets": list(targets(panel)),
    }


NUMBER_OPTIONS: Json = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
GRAPH_OPTIONS: Json = {
    "legend": {"displayMode": "list", "placement": "bottom"},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


def graph(panel: Json) -> Json:
    return {"fillOpacity": 10, **({"stacking": {"mode": "normal"}} if panel.get("stacked") else {})}


def placed(rows: list[Json]) -> Iterator[Json]:
    """Under each row's title its panels: all beside each other when they are numbers, else three abreast, or two."""
    y = 0
    for row in rows:
        numbers, panels = row.get("numbers", False), row["panel"]
        yield {"type": "row", "title": row["title"], "collapsed": False, "panels": [], **place(0, y, COLUMNS, ROW)}
        y += ROW
        abreast = len(panels) if numbers else 3 if len(panels) % 3 == 0 else 2
        width, height = COLUMNS // abreast, NUMBER if numbers else GRAPH
        for index, panel in enumerate(panels):
            below = y + index // abreast * height
            yield {**drawn(panel, numbers), **place(index % abreast * width, below, width, height)}
        y += -(-len(panels) // abreast) * height


def place(x: int, y: int, width: int, height: int) -> Json:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def variable(name: str, label: str, query: str) -> Json:
    """A choice among the values of a label; all of them unless somebody chooses."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # with the time range, so that new workers show up
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def variables() -> list[Json]:
    workers = 'label_values(gllm_worker_info{job=~"$job", queue=~"$queue"}, instance)'
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        variable("job", "Job", "label_values(gllm_worker_info, job)"),
        variable("queue", "Queue", 'label_values(gllm_worker_info{job=~"$job"}, queue)'),
        variable("instance", "Worker", workers),
    ]


def dashboard() -> Json:
    rows = tomllib.loads((FOLDER / "panels.toml").read_text())["row"]
    return {
        "title": "gllm",
        "uid": "gllm",
        "tags": ["gllm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 2,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables()},
        "annotations": {"list": []},
        "editable": True,
        "panels": [{"id": number, **panel} for number, panel in enumerate(placed(rows), start=1)],
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")
