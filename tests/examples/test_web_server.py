"""examples/web/server.py without a browser: going on anywhere, leaving, cancelling, and what it refuses."""

import asyncio
import json
import re
import secrets
import signal
import sys
from asyncio.subprocess import PIPE
from base64 import b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest
from redis.asyncio import Redis

import gllm
from gllm.keys import Keys
from tests.docs.pages import ROOT
from tests.examples.web_bench import Event, Web, text_of_events
from tests.servers import first_kind
from tests.worker.fake_engine import FakeEngine
from tests.worker.service_bench import ServiceBench

PAGE = (ROOT / "examples" / "web" / "page.html").read_text()
SLOW = 0.02  # seconds a token: time to look at a reply in the middle
QUESTION = {"prompt": "hello"}


def new_job() -> str:
    return secrets.token_hex(16)


@pytest.fixture
def server_kind() -> str:
    """One is enough: the client, which is all that talks to Redis here, is tested on each."""
    return first_kind()


@pytest.fixture
def short(web_example: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Replies of so many tokens."""
    monkeypatch.setitem(web_example.SAMPLING, "max_tokens", 40)
    return 40


async def test_web_example_goes_on_behind_every_event(crew: ServiceBench, web: Web, short: int) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=0.005))
    job = new_job()
    for _ in range(2):  # the second time because the page did not see the first answer
        assert (await web.ask("PUT", f"/jobs/{job}", QUESTION)).status == 204
    events = (await web.ask("GET", f"/jobs/{job}/events")).events

    reply = await crew.reply(f"web-{job}")
    assert text_of_events(events) == reply.text
    assert len(reply.ids) == short
    assert len(worker.engine.added) == 1
    assert [event.data["type"] for event in (events[0], events[-1])] == ["start", "done"]
    for index, event in enumerate(events[:-1]):
        by_page = await web.ask("GET", f"/jobs/{job}/events?after={event.id}")
        by_browser = await web.ask("GET", f"/jobs/{job}/events?after=0-0.0", Last_Event_ID=event.id)
        assert by_page.events == by_browser.events == events[index + 1 :]
    at_end = await web.ask("GET", f"/jobs/{job}/events", Last_Event_ID=events[-1].id)
    assert (at_end.status, at_end.body) == (204, "")


async def test_web_example_page_may_leave_and_come_back(crew: ServiceBench, web: Web, short: int) -> None:
    await crew.start(engine=FakeEngine(step_seconds=SLOW))
    job = new_job()
    await web.ask("PUT", f"/jobs/{job}", QUESTION)
    seen: list[Event] = []
    for _ in range(3):
        async with web.stream(job, seen[-1].id if seen else "0-0.0") as stream:
            seen += await stream.read(4)
        await crew.until(lambda: not web.site.connections, "the end of what a page left behind")
    seen += (await web.ask("GET", f"/jobs/{job}/events?after={seen[-1].id}")).events

    reply = await crew.reply(f"web-{job}")
    assert text_of_events(seen) == reply.text
    assert seen[-1].data["finish_reason"] == "length"
    assert len(seen) == len({event.id for event in seen}) == len(reply.events)


async def test_web_example_reads_through_a_repair_of_the_stream(
    crew: ServiceBench, web: Web, short: int, redis: Redis
) -> None:
    """The entries that a page has seen may come again as larger ones: the characters in the place keep that exact."""
    await crew.start()
    job = new_job()
    await web.ask("PUT", f"/jobs/{job}", QUESTION)
    reply = await crew.reply(f"web-{job}")
    out = crew.bench.keys.out(f"web-{job}")
    await redis.delete(out)
    whole = {"type": "tokens", "from": 0, "at": 0, "ids": reply.ids, "text": reply.text}
    await redis.xadd(out, {"d": json.dumps(whole)}, id=f"{short}-0")
    await redis.expire(out, 60)

    async with web.stream(job, "7-0.7") as stream:
        (rest,) = await stream.read(1)
    assert rest.data["text"] == reply.text[7:]
    assert rest.id == f"{short}-0.{short}"


async def test_web_example_cancels_when_asked(crew: ServiceBench, web: Web) -> None:
    await crew.start(engine=FakeEngine(step_seconds=SLOW))
    job = new_job()
    await web.ask("PUT", f"/jobs/{job}", QUESTION)
    async with web.stream(job) as stream:
        await stream.read(3)
        assert (await web.ask("DELETE", f"/jobs/{job}")).status == 204
    assert (await crew.reply(f"web-{job}")).end.finish_reason == "cancelled"


async def test_web_example_lets_a_reader_go_that_takes_nothing(
    web: Web, web_example: Any, redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(web_example.send.__globals__, "SLOW_SECONDS", 0.3)
    job = new_job()
    out = keys.out(f"web-{job}")
    for n in range(1, 121):  # more than all the buffers on the way hold
        event = {"type": "tokens", "from": n - 1, "at": (n - 1) * 100_000, "ids": [7], "text": "x" * 100_000}
        await redis.xadd(out, {"d": json.dumps(event)}, id=f"{n}-0")
    await redis.expire(out, 60)
    async with web.stream(job):
        assert await left(web)


async def test_web_example_notices_that_a_page_has_left_while_nothing_is_written(web: Web) -> None:
    async with web.stream(new_job()) as stream:
        await stream.block()
    assert await left(web)


async def left(web: Web) -> bool:
    """Whether all connections end, before anything is sent that would show a dead one."""
    _, alive = await asyncio.wait([*web.site.connections, asyncio.create_task(asyncio.sleep(0))], timeout=10)
    return not alive


async def test_web_example_shows_signs_of_life(web: Web, web_example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_example, "BEAT_SECONDS", 0.05)
    async with web.stream(new_job()) as stream:
        assert [await stream.block() for _ in range(3)] == ["retry: 1000", ": still here", ": still here"]


async def test_web_example_says_that_a_reply_is_gone(crew: ServiceBench, web: Web, short: int, redis: Redis) -> None:
    await crew.start()
    job = new_job()
    await web.ask("PUT", f"/jobs/{job}", QUESTION)
    await crew.reply(f"web-{job}")
    await redis.delete(crew.bench.keys.out(f"web-{job}"))
    (event,) = (await web.ask("GET", f"/jobs/{job}/events")).events
    assert (event.id, event.data["type"], event.data["code"]) == ("", "error", "ReplyExpired")


async def test_web_example_cannot_reach_the_jobs_of_other_producers(
    crew: ServiceBench, web: Web, short: int, redis: Redis
) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=SLOW))
    job = new_job()
    await crew.submit(job, max_tokens=30)
    await crew.published(job, 3)
    async with web.stream(job) as stream:
        await web.ask("PUT", f"/jobs/{job}", QUESTION)
        assert (await stream.read(1))[0].id == "0-1.0"
        assert (await web.ask("DELETE", f"/jobs/{job}")).status == 204
    assert (await crew.reply(f"web-{job}")).end.finish_reason == "cancelled"
    assert (await crew.reply(job)).end.finish_reason == "length"
    assert len(worker.engine.added) == 2


async def test_web_example_says_in_words_that_redis_is_away(web_example: Any) -> None:
    client = gllm.Client("redis://127.0.0.1:1/0", patience=0.05)
    site = web_example.Site(client, PAGE.encode())
    async with client, site.listening(0) as port:
        web = Web(site, port)
        for method in ("PUT", "DELETE"):
            answer = await web.ask(method, f"/jobs/{new_job()}", QUESTION)
            assert (answer.status, answer.body) == (503, "Redis cannot be reached.")
        stream = await web.ask("GET", f"/jobs/{new_job()}/events")
    assert (stream.status, stream.body) == (200, "retry: 1000\n\n"), "a browser connects again to what has no end"


@pytest.fixture
async def idle(web_example: Any) -> AsyncIterator[Web]:
    """A server that asks no Redis."""
    client = gllm.Client("redis://127.0.0.1:1/0")
    site = web_example.Site(client, PAGE.encode())
    async with client, site.listening(0) as port:
        yield Web(site, port)


JOB = "0123456789abcdef" * 2
REFUSED = [
    (404, "GET", "/server.py", None, {}),
    (404, "GET", "/../server.py", None, {}),
    (404, "POST", f"/jobs/{JOB}", QUESTION, {}),
    (404, "PUT", f"/jobs/{JOB[1:]}", QUESTION, {}),
    (404, "PUT", f"/jobs/{JOB.upper()}", QUESTION, {}),
    (404, "GET", "/jobs/*/events", None, {}),
    (400, "PUT", f"/jobs/{JOB}", None, {}),
    (400, "PUT", f"/jobs/{JOB}", {"prompt": "  "}, {}),
    (400, "PUT", f"/jobs/{JOB}", {"prompt": 7}, {}),
    (400, "PUT", f"/jobs/{JOB}", [], {}),
    (400, "PUT", f"/jobs/{JOB}", {"prompt": "\ud800"}, {}),
    (400, "PUT", f"/jobs/{JOB}", b"[" * 60_000, {}),
    (400, "PUT", f"/jobs/{JOB}", b"\xff", {}),
    (413, "PUT", f"/jobs/{JOB}", {"prompt": "x" * 70_000}, {}),
    (413, "PUT", f"/jobs/{JOB}", QUESTION, {"Transfer_Encoding": "chunked"}),
    (413, "PUT", f"/jobs/{JOB}", QUESTION, {"Content_Length": "-1"}),
    (400, "PUT", f"/jobs/{JOB}", QUESTION, {"Content_Length": "ten"}),
    (400, "GET", f"/jobs/{JOB}/events?after=soon", None, {}),
    (400, "GET", f"/jobs/{JOB}/events?after=9999999999-0.1", None, {}),
    (400, "GET", f"/jobs/{JOB}/events", None, {"Last_Event_ID": "1-0"}),
    (421, "GET", "/", None, {"Host": "evil.example"}),
    (421, "GET", "/", None, {"Host": "localhost.evil.example:80"}),
    (400, "GET", "/", None, {"Cookie": "x" * 20_000}),
]


@pytest.mark.parametrize(("status", "method", "path", "body", "headers"), REFUSED)
async def test_web_example_refuses(
    idle: Web, status: int, method: str, path: str, body: object, headers: dict[str, str]
) -> None:
    answer = await idle.ask(method, path, body, **headers)
    assert answer.status == status
    assert answer.body
    assert "Traceback" not in answer.body


@pytest.mark.parametrize("data", [b"", b"GET", b"\r\n\r\n", b"GET /\r\n\r\n", b"\x16\x03\x01\xff\r\n\r\n"])
async def test_web_example_bears_what_is_no_http(idle: Web, data: bytes) -> None:
    async with idle.raw(data) as (reader, writer):
        writer.write_eof()
        async with asyncio.timeout(10):
            assert (await reader.read()).partition(b"\r\n")[0] in (b"", b"HTTP/1.1 400 Bad Request")


async def test_web_example_bounds_its_connections(idle: Web, web_example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_example, "MAX_CONNECTIONS", 1)
    async with idle.raw(b"GET"):
        assert (await idle.ask("GET", "/")).status == 503


async def test_web_example_page_runs_its_own_script_and_style_only(idle: Web) -> None:
    answer = await idle.ask("GET", "/", Host="localhost:80")
    assert answer.status == 200
    assert answer.body == PAGE
    (policy,) = re.findall(r"Content-Security-Policy: (.*)", answer.head)
    for tag in ("script", "style"):
        assert len(re.findall(rf"<{tag}", PAGE)) == 1
        (own,) = re.findall(rf"<{tag}>(.*)</{tag}>", PAGE, re.DOTALL)
        digest = b64encode(sha256(own.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"unsafe|\*|http", policy)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|https?://| on\w+=\"| style=", PAGE)


async def test_web_example_starts_as_the_page_says_and_ends_at_ctrl_c() -> None:
    command = [sys.executable, str(ROOT / "examples" / "web" / "server.py"), "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        said = (await process.stdout.readline()).decode()
        web = Web(None, int(said.rpartition(":")[2]))
        assert said == f"Open http://127.0.0.1:{web.port}\n"
        assert (await web.ask("GET", "/")).status == 200
        async with web.stream(new_job()):
            process.send_signal(signal.SIGINT)
            _, stderr = await process.communicate()
    assert (process.returncode, stderr) == (0, b"")
