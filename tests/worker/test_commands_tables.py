"""Tables and texts for people, without a server."""

import json

import pytest

from worker.commands.look import job_lines, worker_lines
from worker.commands.screen import page
from worker.commands.tables import Cell, Column, Page, columns_of, fit
from worker.humane import counted, duration, size
from worker.inspection.records import JobList, JobRow, WorkerRow
from worker.terminal import json_line, one_line

NAMES = (Column("NAME", shrinks=True), Column("COUNT", right=True))
EVIL = "a\x1b[31m\x07\n\r\t\x7f\x9b\u202eb"


def job(job_id: str, state: str, **more) -> JobRow:
    values = {"priority": "normal", "stream": "jobs:normal:0", "entry": "1-0", "age_ms": 4200, "tokens": 0}
    return JobRow(**{"id": job_id, "state": state, "attempts": 0, "claims": 0, "cancelling": False, **values, **more})


def jobs(*rows: JobRow, **counts: int) -> JobList:
    return JobList(jobs=list(rows), **{"held": 0, "orphaned": 0, "released": 0, "waiting": 0, "delayed": 0, **counts})


def test_table_of_jobs_as_people_see_it() -> None:
    rows = [
        job("7f3c", "running", priority="high", tokens=1234, worker="host-1-ab"),
        job("chat:42", "running", worker="host-1-ab", cancelling=True, attempts=2),
        job("late", "delayed", due_in_ms=3_600_000),
        job("", "waiting", age_ms=190_000),
    ]
    assert job_lines(Page(), "chat", jobs(*rows, held=2, waiting=1200, delayed=1)) == [
        "queue chat: 2 running, 1,200 waiting, 1 delayed",
        "",
        "JOB      STATE                PRIORITY    AGE  TOKENS  ATTEMPTS  WORKER",
        "7f3c     running              high       4.2s   1,234         0  host-1-ab",
        "chat:42  running, cancelling  normal     4.2s       0         2  host-1-ab",
        "late     delayed 1h           normal     4.2s       0         0  -",
        "-        waiting              normal    3m10s       0         0  -",
        "… and 1,199 more",
    ]
    assert job_lines(Page(), "chat", jobs(held=3, orphaned=2))[0] == "queue chat: 1 running, 0 waiting, 2 orphaned"
    assert job_lines(Page(), "chat", jobs()) == ["queue chat: 0 running, 0 waiting"]


def test_table_of_workers_as_people_see_it() -> None:
    rows = [
        WorkerRow(
            name="host-1-ab", state="alive", jobs=3, heartbeat_ms=800, up_ms=7_300_000, device="cuda:0", capacity="64",
            numerics="3f9a", version="0.1.0", trial="7f3c",
        ),
        WorkerRow(name="host-2-cd", state="gone", jobs=1),
    ]  # fmt: skip
    assert worker_lines(Page(), rows) == [
        "WORKER     STATE  JOBS  HEARTBEAT    UP  DEVICE  TRIAL  NUMERICS  VERSION",
        "host-1-ab  alive  3/64      800ms  2h1m  cuda:0  7f3c   3f9a      0.1.0",
        "host-2-cd  gone      1          -     -  -       -      -         -",
    ]
    assert worker_lines(Page(), []) == ["no workers"]


def test_table_shortens_to_the_width_of_the_terminal() -> None:
    lines = Page(width=20).table(NAMES, [["x" * 50, "1,000"]])
    assert lines == ["NAME           COUNT", "xxxxxxxxxxxx…  1,000"]
    assert Page(width=5).table(NAMES, [["x" * 50, "1"]])[1] == "xxxxxxx…      1", "a column keeps eight characters"


def test_text_that_no_client_could_write_does_not_push_the_rest_away() -> None:
    rows = Page().table(NAMES, [["x" * 5000, "1"], ["y" * 128, "2"]])
    assert [len(line) for line in rows] == [130 + len("  COUNT")] * 3
    assert rows[1].startswith("x" * 129 + "…")
    assert "y" * 128 in rows[2]
    last = Page().table(NAMES[::-1], [["1", "x" * 5000]])
    assert last[1].endswith("x" * 5000), "what stands last pushes nothing away"


def test_table_aligns_wide_and_combining_characters() -> None:
    lines = Page().table(NAMES, [["日本", "1"], ["e\u0301", "22"], ["🙂", "3"]])
    assert {columns_of(line) for line in lines} == {len("NAME  COUNT")}
    assert (fit("日本語", 5), fit("日本語", 6)) == ("日本…", "日本語")


def test_nothing_in_a_table_can_steer_a_terminal() -> None:
    to = Page(coloured=True)
    text = "\n".join([*to.table(NAMES, [[EVIL, Cell(EVIL, None)]]), *to.pairs([("name", EVIL)])])
    plain = text.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert {char for char in plain if not char.isprintable()} == {"\n"}
    assert len(plain.splitlines()) == 3
    assert one_line(EVIL) == "a␛[31m␇␊␍␉␡��b"


def test_json_keeps_what_a_terminal_must_not_see() -> None:
    line = json_line({"id": EVIL + "é"})
    assert json.loads(line) == {"id": EVIL + "é"}
    assert line.isprintable()


def test_colours_are_for_terminals_of_people_who_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert page() == Page(), "standard output of a test is no terminal"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "77")
    assert page() == Page(77, True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert page() == Page(77, False)
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert page() == Page(77, False)
    assert Page(coloured=True).paint("x", "red") == "\x1b[31mx\x1b[0m"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "-"), (0, "0ms"), (999.9, "999ms"), (4200, "4.2s"), (9999, "9.9s"), (45_400, "45s"), (59_999, "59s"),
        (60_000, "1m"), (200_000, "3m20s"), (7_500_000, "2h5m"), (100 * 3_600_000, "4d4h"), (-4200, "-4.2s"),
    ],
)  # fmt: skip
def test_durations_are_short(ms: float | None, text: str) -> None:
    assert duration(ms) == text


def test_sizes_and_counts_are_short() -> None:
    assert [size(count) for count in (None, 0, 1023, 1024, 5 << 20, 3 << 40, 5000 << 40)] == [
        "-", "0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 TiB", "5000.0 TiB",
    ]  # fmt: skip
    assert [counted(count, "job") for count in (0, 1, 1204)] == ["0 jobs", "1 job", "1,204 jobs"]
