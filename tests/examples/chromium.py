"""A headless Chromium, driven over the pipe of its DevTools protocol: no driver, no library, no port."""

import asyncio
import base64
import fcntl
import itertools
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
LIMIT_SECONDS = 60.0  # for whatever is waited for
MESSAGE_BYTES = 64 * 1024 * 1024  # a picture is one message
# Puts the pipe where the browser expects it: it reads commands from 3 and writes to 4.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--no-default-browser-check", "--disable-sync", "--force-color-profile=srgb"),
)


def browser_path() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser. `errors`: what its pages complained about, a broken security policy among it."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._listening = asyncio.create_task(self._listen())
        self.errors: list[str] = []

    async def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """One command of the protocol; its result."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self._waiting[number]

    async def _listen(self) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                self._take(json.loads((await self._reader.readuntil(b"\0"))[:-1]))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            future = self._waiting.pop(message["id"])
            if not future.done():
                error = message.get("error")
                future.set_exception(RuntimeError(str(error))) if error else future.set_result(message["result"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["source"] != "network":
            self.errors.append(message["params"]["entry"]["text"])

    async def open(self, url: str, *, width: int = 900, height: int = 800) -> "Tab":
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.call("Page.navigate", url=url)
        await tab.until("document.readyState === 'complete' && location.protocol === 'http:'")
        return tab

    async def close(self) -> None:
        """With all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._writer.close()


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, self._session, **params)

    async def value(self, expression: str) -> Any:
        """What an expression of JavaScript is in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait for an expression to become true, also across a reload."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while not await self._true(expression):  # noqa: ASYNC110 (the event would be in another process)
                await asyncio.sleep(0.05)

    async def _true(self, expression: str) -> bool:
        try:
            return bool(await self.value(expression))
        except RuntimeError:  # the page was just being replaced
            return False

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, control: bool = False) -> None:
        code = {"Enter": 13, "Tab": 9}[key]
        name = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 if control else 0}
        typed = {} if control else {"text": {"Enter": "\r", "Tab": "\t"}[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **name, **typed)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **name)

    async def reload(self) -> None:
        """Returns when the old page is gone and the new one is there."""
        await self.value("window.old = true")
        await self.call("Page.reload")
        await self.until("!window.old && document.readyState === 'complete'")

    async def picture(self) -> bytes:
        """A PNG of what the window shows."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def chromium(folder: Path, *flags: str) -> AsyncIterator[Browser]:
    """A running browser with a profile of its own in `folder`."""
    path = browser_path()
    assert path is not None
    commands, to_browser = pipe()
    from_browser, replies = pipe()
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    words = [str(commands), str(replies), path, *FLAGS, *sandbox, f"--user-data-dir={folder}", *flags]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", START, *words),
        pass_fds=(commands, replies),
        start_new_session=True,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    os.close(commands)
    os.close(replies)
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=MESSAGE_BYTES)
    into = asyncio.StreamReaderProtocol(reader)
    incoming, _ = await loop.connect_read_pipe(lambda: into, os.fdopen(from_browser, "rb"))
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_browser, "wb"))
    browser = Browser(process, reader, writer)
    try:
        yield browser
    finally:
        await browser.close()
        incoming.close()


def pipe() -> tuple[int, int]:
    """Two ends with numbers above those that the browser will use."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
