"""Alert rules: promtool's own tests of them, and that they ask for series that a worker has."""

import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.deploy.files import DEPLOY, ROOT, documents
from worker.metrics import Metrics

RULES = DEPLOY / "prometheus" / "alerts.yml"
ALERTS = {
    *("GllmQueueGrowing", "GllmNoWorker", "GllmLeaseAge", "GllmDeadLetters"),
    *("GllmErrorRate", "GllmKvFull", "GllmSlowFirstToken"),
}
# Shown only once there is something to show: a queue was seen, a lease is held.
LATER = ("gllm_queue_depth", "gllm_lease_age_seconds", "gllm_lease_seconds")


def rules() -> list[dict[str, Any]]:
    return documents(RULES)[0]["groups"][0]["rules"]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def series() -> dict[str, set[tuple[str, str]]]:
    """Name and labels of everything that a worker shows."""
    found = {name: set[tuple[str, str]]() for name in LATER}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? ", Metrics().render().decode(), re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="([^"]*)"', labels))
    return found


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian and Ubuntu: in the package prometheus)")
    done = subprocess.run([program, *arguments], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_configuration_and_rules() -> None:
    promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(ROOT / "tests" / "deploy" / "alerts_test.yml"))


def test_every_alert_is_there_and_fires_in_a_case() -> None:
    assert set(alerts()) == ALERTS
    cases = [case for test in documents(ROOT / "tests" / "deploy" / "alerts_test.yml")[0]["tests"] for case in
             test["alert_rule_test"]]  # fmt: skip
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == ALERTS
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == ALERTS


def test_every_alert_says_how_bad_it_is_and_where_to_read_on() -> None:
    pages = (ROOT / "docs" / "operations.md").read_text() + (DEPLOY / "README.md").read_text()
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["runbook"] == f"docs/operations.md, {name}"
        assert rule["annotations"]["summary"]
        assert f"`{name}`" in pages


@pytest.mark.parametrize("expression", [pytest.param(rule["expr"], id=next(iter(rule.values()))) for rule in rules()])
def test_a_rule_asks_for_series_and_labels_that_exist(expression: str) -> None:
    known, recorded = series(), {rule["record"] for rule in rules() if "record" in rule}
    asked = set(re.findall(r"(?<![\w:])gllm_\w+(?![\w:])", expression))
    assert asked or recorded & set(re.findall(r"[\w:]+", expression))
    assert asked <= set(known)
    for name, selector in re.findall(r"(gllm_\w+)\{([^}]*)\}", expression):
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            assert label == "job" or {(label, value) for value in values.split("|")} <= known[name]
