"""An engine process that is refused, fails, is killed, or loses its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from engine import EngineConfig, SamplingParams
from engine.request import Delta, FinishReason, Stats
from engine.wire import Stepped
from tests.engine.driving import request
from tests.engine.talking import Talk, breakable_child
from worker.bridge import ROOT, Bridge, EngineRefused

PROMPT = list(range(20, 33))
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)

# A worker, as far as its engine is concerned: starts two engines, gives the first a step that never ends, and waits.
PARENT = """
import asyncio, os, sys
from engine import EngineConfig, Request
from worker.bridge import Bridge

async def main():
    sys.executable, model = sys.argv[1:]
    config = EngineConfig(model=model, device="cpu", dtype="float32", kv_blocks=16, threads=1)
    busy, idle = Bridge(), Bridge()
    await busy.start(config)
    os.environ["ONLY_END_OF_FILE"] = "1"
    await idle.start(config)
    busy.add(Request(id="hang", tokens=[5]))
    anything = asyncio.create_task(anext(busy.deltas()))
    while not busy.in_flight:
        await asyncio.sleep(0.01)
    print(busy._process.pid, idle._process.pid, flush=True)
    await anything

asyncio.run(main())
"""


@pytest.fixture
def config(checkpoints) -> EngineConfig:
    return EngineConfig(model=str(checkpoints()[0]), device="cpu", dtype="float32", kv_blocks=256, threads=1)


@pytest.fixture
def breakable(monkeypatch, tmp_path) -> str:
    """From now on an engine process is one that breaks on request."""
    monkeypatch.setattr(sys, "executable", breakable_child(tmp_path))
    return sys.executable


async def test_a_model_that_is_not_there_is_refused_by_name(tmp_path):
    talk = Talk()
    with pytest.raises(EngineRefused, match="nowhere"):
        await talk.start(EngineConfig(model=str(tmp_path / "nowhere"), device="cpu"))
    await talk.bridge.close()


async def test_a_forward_that_raises_ends_the_child_and_names_its_requests(breakable, config):
    talk = Talk()
    await talk.start(config)
    talk.bridge.add(request("held", PROMPT, LONG))
    talk.bridge.hold("held")
    talk.bridge.add(request("beside", PROMPT, LONG))
    talk.bridge.add(request("done", PROMPT))
    await talk.ended("done")
    talk.bridge.add(request("raise", PROMPT))
    await talk.until(lambda: talk.died)
    assert "injected" in str(talk.died)
    assert sorted(talk.died.in_flight) == ["beside", "raise"]
    assert await asyncio.wait_for(talk.bridge._process.wait(), 5) == 1
    await talk.close()


@pytest.mark.parametrize("how", ["from outside", "by the bridge"])
async def test_a_killed_child_names_what_it_was_at(breakable, config, how):
    talk = Talk()
    await talk.start(config)
    talk.bridge.add(request("beside", PROMPT, LONG))
    talk.bridge.add(request("done", PROMPT))
    await talk.ended("done")
    talk.bridge.add(request("hang", PROMPT))
    await talk.until(lambda: "hang" in talk.bridge.in_flight)
    if how == "by the bridge":
        talk.bridge.kill()
    else:
        os.kill(talk.bridge._process.pid, signal.SIGKILL)
    await talk.until(lambda: talk.died)
    assert sorted(talk.died.in_flight) == ["beside", "hang"]
    assert "status -9" in str(talk.died)
    await talk.close()


def test_a_request_that_has_ended_is_not_in_flight_though_the_next_launch_is_not_reported_yet():
    bridge = Bridge()
    for name in ("a", "b"):
        bridge.add(request(name, PROMPT))
    bridge._launched = ["a", "b"]
    bridge._note(Stepped([Delta(id="a", finish_reason=FinishReason.LENGTH)], Stats()))
    assert bridge.in_flight == ["b"]


async def test_a_child_that_hangs_up_and_stays_is_not_waited_for(breakable, config, monkeypatch):
    monkeypatch.setattr("worker.bridge.STOP_SECONDS", 0.2)
    talk = Talk()
    await talk.start(config)
    talk.bridge.add(request("hang up", PROMPT))
    await talk.until(lambda: talk.died)
    assert (str(talk.died), talk.died.in_flight) == ("the engine's process ended with status -9", ["hang up"])
    await talk.close()


async def test_a_closed_child_is_not_waited_for_by_way_of_what_it_has_started(breakable, config):
    """A compiler, say, that holds the child's output open."""
    talk = Talk()
    await talk.start(config)
    talk.bridge.add(request("spawn", PROMPT, SamplingParams(max_tokens=1)))
    await talk.ended("spawn")
    began = time.monotonic()
    await talk.close()
    assert time.monotonic() - began < 4


def alive(pid: int) -> bool:
    """Whether a process still runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_children_die_with_their_parent_within_a_second(config, tmp_path):
    """One in the middle of a step, by the kernel's signal; one that is idle, by the end of its socket alone."""
    command = [sys.executable, "-c", PARENT, breakable_child(tmp_path), config.model]
    environment = os.environ | {"PYTHONPATH": ROOT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2
        assert all(alive(pid) for pid in children)
        parent.kill()
        end = time.monotonic() + 1.0
        while (left := [pid for pid in children if alive(pid)]) and time.monotonic() < end:
            time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


async def test_a_line_without_end_does_not_stop_the_relay_of_what_the_child_prints():
    """Unread output would fill the pipe, and the engine would wait in its next print for ever."""
    output = asyncio.StreamReader(limit=64)
    output.feed_data(b"x" * 200 + b"\n" + b"next\n")
    output.feed_eof()
    with structlog.testing.capture_logs() as lines:
        await Bridge()._relay_output(SimpleNamespace(stdout=output))
    assert [line["line"] for line in lines] == ["(a line too long to show)", "next"]
