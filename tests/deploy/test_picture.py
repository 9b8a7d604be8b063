"""The dashboard as a picture: what Prometheus answers is drawn at its moments, and numbers look as in Grafana."""

import http.server
import json
import math
import runpy
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.files import DEPLOY

PICTURE = runpy.run_path(str(DEPLOY / "grafana" / "picture.py"))
PANELS: list[dict[str, Any]] = json.loads(PICTURE["DASHBOARD"].read_text())["panels"]


class Answers(http.server.BaseHTTPRequestHandler):
    """Two lines for each query: one from the middle to the end with a hole, and one that is never a number."""

    def do_GET(self) -> None:
        asked = {
            name: value for name, (value,) in urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query).items()
        }
        start, end, step = (float(asked[name]) for name in ("start", "end", "step"))
        count = round((end - start) / step)
        moments = [round(start + step * index, 3) for index in range(count // 2, count + 1)]
        values = [[moment, "NaN" if index == 3 else str(index)] for index, moment in enumerate(moments)]
        never = [[moments[0], "NaN"]]
        found = [{"metric": {"priority": "high"}, "values": values}, {"metric": {"priority": "low"}, "values": never}]
        body = json.dumps({"data": {"result": found}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_picture_puts_values_at_their_moments_and_drops_what_is_no_number(url: str) -> None:
    (panel,) = [panel for panel in PANELS if panel["title"] == "Jobs waiting"]
    (line,) = PICTURE["Prometheus"](url, 10, 20).lines(panel)
    assert line.legend == "high"
    assert len(line.values) == PICTURE["POINTS"] + 1
    half = PICTURE["POINTS"] // 2
    assert all(map(math.isnan, line.values[:half]))
    assert math.isnan(line.values[half + 3])
    assert (line.values[half], line.values[half + 4], line.values[-1]) == (0, 4, half)


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0.123, "percentunit", "12.3 %"),
        (0, "s", "0 s"),
        (0.0421, "s", "42.1 ms"),
        (12.5, "s", "12.5 s"),
        (3 * 2**29, "bytes", "1.5 GiB"),
        (1234, "short", "1.23 k"),
        (0, "ops", "0/s"),
    ],
)
def test_picture_writes_numbers_with_their_units(number: float, unit: str, text: str) -> None:
    assert PICTURE["shown"](number, unit) == text


def test_picture_of_a_number_a_stack_and_lines_is_a_png(url: str, tmp_path: Path) -> None:
    titles = ("Waiting", "Jobs waiting", "Memory", "Hit rate")
    target = tmp_path / "dashboard.png"
    PICTURE["draw"]([panel for panel in PANELS if panel["title"] in titles], PICTURE["Prometheus"](url, 10, 20), target)
    assert target.read_bytes().startswith(b"\x89PNG")
