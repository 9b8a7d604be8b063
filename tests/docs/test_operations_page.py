"""docs/operations.md says what the code does: settings, metrics, ways of healing, log events, exit statuses."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Page, codes
from worker import claimer, lease, logs, queue, running, service, watchdog
from worker.cli import main
from worker.config import OPTIONS, Settings
from worker.metrics import Metrics
from worker.metrics.names import DEAD_LETTERS, REDIS_ERRORS, REPAIRS, TAKEOVERS

PAGE = Page("docs/operations.md")
PROTOCOL = Page("docs/protocol.md")
UNIT = ROOT / "deploy" / "systemd" / "gllm-worker@.service"
EVENTS = {value for name, value in vars(logs).items() if name.isupper() and isinstance(value, str)}


def metric_names() -> set[str]:
    metrics = Metrics()
    return {family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()}


def test_settings_table_has_every_flag_with_its_default() -> None:
    table = PAGE.table("Settings")
    assert {flag for cell in table for flag in re.findall(r"--(?!no-)[\w-]+", cell)} == {
        option.flag for option in OPTIONS
    }
    defaults = {option.flag: getattr(Settings(), option.name) for option in OPTIONS}
    for cell, (given, _) in table.items():
        value = defaults[re.findall(r"--[\w-]+", cell)[0]]
        if value is not None:
            shown = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
            assert given.strip("`") == (f"{shown:g}" if isinstance(shown, float) else str(shown)), cell


def test_metrics_table_has_every_metric_and_nothing_else() -> None:
    named = {name for cell in PAGE.table("Metrics") for name in re.findall(r"gllm_\w+", cell)}
    assert named == metric_names()


def test_no_page_names_a_metric_that_is_not_there() -> None:
    named = set(re.findall(r"\bgllm_[a-z_]+", PAGE.text + PROTOCOL.text))
    histograms = {f"{name}{part}" for name in metric_names() for part in ("_bucket", "_count", "_sum")}
    assert named - metric_names() - histograms == set()


def test_every_way_of_healing_is_explained_and_has_its_log_event() -> None:
    table = PAGE.table("What heals itself")
    assert set(table) == {*TAKEOVERS, *REPAIRS}
    assert {code for row in table.values() for code in codes(row[2])} <= EVENTS
    assert [path for path, row in table.items() if not codes(row[2])] == ["duplicate"]
    assert list(PAGE.table("What heals itself", 1)) == list(REDIS_ERRORS)


def test_every_reason_of_a_dead_letter_says_what_to_do() -> None:
    named = {code for cell in PAGE.table("Poison jobs and dead letters") for code in re.findall(r"\w+", cell)}
    assert named == set(PROTOCOL.table("Dead letters"))
    assert named | {"unwritten"} == set(DEAD_LETTERS)
    meaning = PAGE.table("Metrics")["gllm_dead_letters_total{reason}"][0]
    assert set(codes(meaning)) - {"dead"} == set(DEAD_LETTERS)


def test_exit_statuses_and_times_on_the_page_are_those_of_the_code() -> None:
    assert list(PAGE.table("Start and stop"))[:3] == [str(service.OK), str(service.FAILED), str(service.REFUSED)]
    assert f"no step ended in {watchdog.HANG_SECONDS:g} seconds" in PAGE.text
    assert f"a lease ({Settings().lease:g} seconds)" in PAGE.text
    assert f"for {lease.FENCE_AT:g} of a lease" in PAGE.text
    assert (queue.MAX_ATTEMPTS, queue.MAX_CLAIMS) == (4, 32)
    assert "After four charged deaths (or 32 claims" in " ".join(PAGE.text.split())
    assert queue.REVERSED_EVERY == 8
    assert "every eighth time" in PROTOCOL.text
    assert lease.RENEWALS_PER_LEASE == 3
    assert "a third of the lease (5 seconds by default)" in PROTOCOL.text


def test_log_events_on_the_page_are_of_the_vocabulary() -> None:
    """What reads like one, in the table of symptoms."""
    words = {code for row in PAGE.table("When something is wrong").values() for cell in row for code in codes(cell)}
    events = {word for word in words if re.fullmatch(r"(redis|engine|queue|job)_[a-z]+", word)}
    assert events
    assert events <= EVENTS


def test_commands_that_pages_name_exist() -> None:
    named = set(re.findall(r"`gllm ([a-z]+)", PAGE.text + PROTOCOL.text))
    named |= set(re.findall(r"^gllm ([a-z]+)", "\n".join(PAGE.blocks("sh")), re.MULTILINE))
    assert named <= set(main.commands)


def test_outcomes_of_a_claim_are_error_codes_and_finish_reasons_of_the_protocol() -> None:
    reasons = set(codes(PROTOCOL.sections["Read the reply"])) | set(PROTOCOL.table("Errors"))
    assert set(claimer.ENDED) <= reasons


def test_unit_waits_longer_than_a_drain_and_knows_the_exit_statuses() -> None:
    unit = UNIT.read_text()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) >= Settings().grace + running.LAST_WORDS_SECONDS + 5
    assert f"wait {stop} seconds before SIGKILL" in " ".join(PAGE.text.split())
    assert re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE) == [str(service.REFUSED)]
    assert re.findall(r"^ExecStart=\S+/gllm (.*)$", unit, re.MULTILINE) == ["worker"]
    variables = {variable for option in OPTIONS for variable in option.variables}
    assert set(re.findall(r"\bGLLM_\w+", unit)) <= variables


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = UNIT.read_text().replace("/opt/gllm/bin/gllm", shutil.which("true") or "/bin/true")
    copy = tmp_path / "gllm-worker@00.service"
    copy.write_text(unit.replace("/etc/gllm/worker.env", "-/etc/gllm/worker.env"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
