"""Talking to an engine process: gather what a bridge says, and a child that breaks on request."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine import EngineConfig
from tests.engine.driving import Reply
from worker.bridge import ROOT, Bridge, EngineDied

WAIT_SECONDS = 20.0

# An engine process that breaks on request: ids say what happens in the step that they are in.
_BROKEN_CHILD = f"""#!{sys.executable}
import os, subprocess, sys, time
sys.path.insert(0, {ROOT!r})
from engine import child, runner

launch, compiled = runner.Runner.launch, set()

def broken(self, plan):
    ids = [entry.sequence.id for entry in plan.entries]
    for name in ids:
        if name.startswith("compile") and name not in compiled:
            compiled.add(name)
            self.on_compile("a kernel for " + name)
            time.sleep(1.5)
    if any(name.startswith("spawn") for name in ids):
        subprocess.Popen(["sleep", "10"])
    if any(name.startswith("hang up") for name in ids):
        os.close(int(sys.argv[-1]))
    if any(name.startswith("hang") for name in ids):
        time.sleep(600)
    if any(name.startswith("raise") for name in ids):
        raise RuntimeError("injected")
    return launch(self, plan)

runner.Runner.launch = broken
if os.environ.get("ONLY_END_OF_FILE"):
    child.die_with_parent = lambda: None
sys.exit(child.main(int(sys.argv[-1])))
"""


def breakable_child(directory: Path) -> str:
    """A program to be used as `sys.executable`: it is the engine's process, and breaks on request."""
    script = directory / "child"
    script.write_text(_BROKEN_CHILD)
    script.chmod(0o755)
    return str(script)


class Talk:
    """A bridge and everything it has said."""

    def __init__(self) -> None:
        self.bridge, self.replies, self.died = Bridge(), {}, None

    async def start(self, config: EngineConfig) -> None:
        await self.bridge.start(config)
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            async for deltas in self.bridge.deltas():
                for delta in deltas:
                    self.replies.setdefault(delta.id, Reply()).take(delta)
        except EngineDied as error:
            self.died = error

    async def until(self, what: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"waited for nothing; {self.replies} {self.died}"
            await asyncio.sleep(0.005)

    async def ended(self, *names: str) -> None:
        await self.until(lambda: all(name in self.replies and self.replies[name].ends for name in names))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.bridge.close()
