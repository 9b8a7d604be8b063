"""The Grafana dashboard: it is what its source makes, and its panels ask only for series and labels that exist."""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.metrics_page import populated

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
DASHBOARD = FOLDER / "dashboards" / "gllm.json"
ROWS = ["Now", "Queue", "Latency", "Throughput", "KV and prefix cache", "Reliability", "Resources"]
UNITS = {"short", "s", "ops", "percentunit", "bytes"}  # of those that Grafana knows
FROM_PROMETHEUS = {"job", "instance"}
# Said better by something else on the dashboard, or of no use in a graph.
NOT_SHOWN = {
    f"gllm_{name}"
    for name in (
        "start_time_seconds",
        "worker_info",
        "engine_steps_total",
        "jobs_released_total",
        "metrics_errors_total",
    )
}


def board() -> dict:
    return json.loads(DASHBOARD.read_text())


def panels() -> list[dict]:
    return board()["panels"]


def graphs() -> list[dict]:
    return [panel for panel in panels() if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in graphs():
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


def series() -> dict[str, set[str]]:
    """Name and label names of everything that a worker shows."""
    found: dict[str, set[str]] = {}
    for family in populated().registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set(FROM_PROMETHEUS)).update(sample.labels)
    for name in ("cpu_seconds_total", "resident_memory_bytes"):  # only where there is a /proc
        found[f"gllm_process_{name}"] = {"process", *FROM_PROMETHEUS}
    return found


EVERY_QUERY = pytest.mark.parametrize(
    ("title", "expression"), [pytest.param(*found, id=f"{found[0]}: {found[1][:60]}") for found in expressions()]
)


@EVERY_QUERY
def test_a_panel_asks_for_series_and_labels_that_exist(title: str, expression: str) -> None:
    known = series()
    asked = set(re.findall(r"gllm_\w+", expression))
    assert asked
    assert asked <= set(known), f"panel {title!r}"
    labels = set().union(*(known[name] for name in asked))
    for words in re.findall(r"(?:by|on|group_left) \(([^)]*)\)", expression):
        assert set(re.findall(r"\w+", words)) <= labels, f"panel {title!r}"
    for name, selector in re.findall(r"(gllm_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)=", selector)) <= known[name], f"panel {title!r}"


@EVERY_QUERY
def test_a_panel_looks_at_the_chosen_workers_only(title: str, expression: str) -> None:
    chosen = [
        selector.startswith('{job=~"$job", instance=~"$instance"')
        for selector in re.findall(r"gllm_\w+(\{[^}]*\})?", expression)
    ]
    assert all(chosen) != (title == "Hit rate"), "that one stays as the page on the prefix cache has it"


def test_promtool_can_read_every_query(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian and Ubuntu: in the package prometheus)")
    rules = [
        {"record": f"panel:query:{number}", "expr": re.sub(r"\$__rate_interval", "1m", expression)}
        for number, (_, expression) in enumerate(expressions())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [program, "check", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_has_a_panel() -> None:
    shown = {name for _, expression in expressions() for name in re.findall(r"gllm_\w+", expression)}
    shown = {re.sub(r"(_seconds)_(bucket|count|sum)$", r"\1", name) for name in shown}
    families = {
        family.name + ("_total" if family.type == "counter" else "") for family in populated().registry.collect()
    }
    assert families - shown == NOT_SHOWN


def test_dashboard_is_what_its_source_makes() -> None:
    made = runpy.run_path(str(FOLDER / "dashboard.py"))["dashboard"]()
    assert made == board(), "run: python deploy/grafana/dashboard.py"


def test_rows_are_those_that_people_look_for() -> None:
    assert [panel["title"] for panel in panels() if panel["type"] == "row"] == ROWS


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
    assert {y for _, y in squares} == set(range(max(y for _, y in squares) + 1)), "an empty line"


def test_panels_stand_under_their_row_and_have_titles_of_their_own_in_it() -> None:
    places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in panels()]
    assert places == sorted(places)
    row, titles = "", set[tuple[str, str]]()
    for panel in panels():
        row = panel["title"] if panel["type"] == "row" else row
        assert (row, panel["title"]) not in titles
        titles.add((row, panel["title"]))


def test_panels_say_what_they_show_with_units_and_legends() -> None:
    for panel in graphs():
        title = panel["title"]
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, title
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends), title
        assert len(set(legends)) == len(legends), title
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(legends)]), title
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            outer = re.search(r"^(?:\w+\([\d.]+, )?\w+ by \(([^)]*)\)", target["expr"])
            kept = set(re.findall(r"\w+", outer[1])) - {"le"} if outer else set()
            assert named == kept or title == "Hit rate", f"{title}: lines that no legend tells apart"


def test_seconds_shares_and_bytes_have_their_units() -> None:
    for panel in graphs():
        unit, first = panel["fieldConfig"]["defaults"]["unit"], panel["targets"][0]["expr"]
        if unit == "bytes":
            assert "_bytes" in first
        if unit == "s":
            assert "_seconds" in first
        if unit == "percentunit":
            assert " / " in first or "gllm_step_seconds_sum" in first


def test_choices_are_declared_and_each_narrows_the_next() -> None:
    known = {choice["name"]: choice for choice in board()["templating"]["list"]}
    assert list(known) == ["datasource", "job", "queue", "instance"]
    used = set(re.findall(r"\$\{?(\w+)\}?", DASHBOARD.read_text())) - {"__rate_interval", "__all"}
    assert used == set(known)
    asked = {name: set(re.findall(r"\$(\w+)", choice.get("definition", ""))) for name, choice in known.items()}
    assert asked == {"datasource": set(), "job": set(), "queue": {"job"}, "instance": {"job", "queue"}}
    for choice in list(known.values())[1:]:
        (name,) = re.findall(r"gllm_\w+", choice["definition"])
        assert re.findall(r"(\w+)\)$", choice["definition"])[0] in series()[name]


def test_every_panel_uses_the_chosen_data_source() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in graphs():
        assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [chosen] * (
            1 + len(panel["targets"])
        )
