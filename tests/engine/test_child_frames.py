"""The engine process from inside: its loop in a thread of this process, spoken to in frames."""

import socket
import threading
from collections.abc import Iterator

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.child import Channel, ParentGoneError, _serve
from engine.runner import Runner
from engine.wire import (
    HEADER_BYTES,
    Add,
    Begin,
    Cancel,
    Command,
    Compiling,
    Failed,
    Hold,
    Launching,
    Loading,
    Ready,
    Report,
    Stepped,
    Stop,
    Unhold,
    encode_frame,
    report_decoder,
)  # fmt: skip
from tests.engine.driving import GREEDY, request

PROMPT = list(range(20, 33))
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


class Parent:
    """The other end of a child that runs in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(60)  # loading takes long on a busy machine
        self.status: int | str | None = None
        self._thread = threading.Thread(target=self._run, args=(theirs,))
        self._thread.start()
        self.send(Begin(config))

    def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                self.status = _serve(Channel(connection))
            except ParentGoneError:
                self.status = "parent gone"

    def send(self, *commands: Command) -> None:
        """All in one piece, so that the child finds them together."""
        self._ours.sendall(b"".join(encode_frame(command) for command in commands))

    def receive(self) -> Report:
        return report_decoder.decode(self._exactly(int.from_bytes(self._exactly(HEADER_BYTES), "big")))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += (chunk := self._ours.recv(count - len(data)))
            assert chunk, "the child hung up"
        return data

    def until(self, kind: type, what=lambda report: True) -> list[Report]:
        """All reports up to the first of this kind that fits."""
        reports = [self.receive()]
        while not (isinstance(reports[-1], kind) and what(reports[-1])):
            reports.append(self.receive())
        return reports

    def ended(self, name: str) -> list[Report]:
        return self.until(Stepped, lambda s: any(d.id == name and d.finish_reason for d in s.deltas))

    def leave(self) -> int | str | None:
        self._ours.close()
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.status


@pytest.fixture
def config(checkpoints, monkeypatch) -> EngineConfig:
    monkeypatch.setattr("gc.freeze", lambda: None)  # this process goes on afterwards
    return EngineConfig(model=str(checkpoints()[0]), device="cpu", dtype="float32", kv_blocks=64, threads=1)


@pytest.fixture
def parent(config) -> Iterator[Parent]:
    parent = Parent(config)
    parent.until(Ready)
    yield parent
    parent.leave()


@pytest.fixture
def breaking(monkeypatch) -> None:
    """A step fails when a request named `bad` is in it."""
    launch = Runner.launch

    def broken(self, plan):
        if any(entry.sequence.id == "bad" for entry in plan.entries):
            raise RuntimeError("injected")
        return launch(self, plan)

    monkeypatch.setattr(Runner, "launch", broken)


def launching(reports: list[Report]) -> list[list[str]]:
    return [report.ids for report in reports if isinstance(report, Launching)]


def test_a_child_reports_its_phases_then_ready(config):
    parent = Parent(config)
    assert [type(report) for report in parent.until(Ready)] == [Loading, Loading, Ready]
    parent.send(Stop())
    parent.until(Stepped)
    assert parent.leave() == 0


def test_a_child_says_what_it_compiles_before_it_does(config, monkeypatch):
    warm_up, launch = Runner.warm_up, Runner.launch

    def warm_up_compiling(self):
        self.on_compile("kernels")
        return warm_up(self)

    def launch_capturing(self, plan):
        self.on_compile(f"a graph of {len(plan.entries)} rows")
        return launch(self, plan)

    monkeypatch.setattr(Runner, "warm_up", warm_up_compiling)
    monkeypatch.setattr(Runner, "launch", launch_capturing)
    parent = Parent(config)
    assert [type(report) for report in parent.until(Ready)] == [Loading, Compiling, Loading, Ready]
    parent.send(Add(request("x", PROMPT)))
    first = parent.until(Stepped, lambda s: s.deltas)
    assert first[:2] == [Launching(["x"]), Compiling("a graph of 1 rows")]
    parent.leave()


def test_a_child_ends_when_its_parent_hangs_up_idle_or_busy(config):
    for commands in ([], [Add(request("x", PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)))]):
        parent = Parent(config)
        parent.until(Ready)
        parent.send(*commands)
        assert parent.leave() == "parent gone"


def test_an_idle_child_looks_at_its_books_once(parent, monkeypatch):
    """They take tens of milliseconds in a large pool, in which a new request would wait."""
    looks: list[int] = []
    monkeypatch.setattr("engine.child.IDLE_SECONDS", 0.01)
    monkeypatch.setattr(Engine, "check", lambda self: looks.append(1))
    for name in ("first", "second"):
        looks.clear()
        parent.send(Add(request(name, PROMPT)))
        parent.ended(name)
        for _ in range(5):
            parent.until(Stepped, lambda report: not report.deltas)
        assert len(looks) == 1


def test_settings_at_fault_are_reported_as_refused(config):
    parent = Parent(EngineConfig(model=config.model, device="cpu", block_size=0))
    report = parent.until(Failed)[-1]
    assert (report.refused, report.in_flight) == (True, [])
    assert report.message == "block_size: a whole number of at least 1 expected, got 0"
    assert parent.leave() == 2


def test_who_is_in_flight_is_said_when_it_changes_and_when_nobody_is(parent):
    parent.send(Add(request("x", PROMPT)), Add(request("y", PROMPT, LONG)))
    assert launching(parent.ended("x")) == [["x", "y"]]
    assert launching(parent.ended("y")) == [["y"]]
    assert parent.until(Launching)[-1].ids == []


def test_a_held_request_is_not_in_flight(parent):
    parent.send(Add(request("x", PROMPT, LONG)))
    parent.until(Stepped, lambda s: s.deltas)
    parent.send(Hold("x"))
    assert parent.until(Launching, lambda report: not report.ids)
    parent.send(Unhold("x"))
    assert launching(parent.ended("x")) == [["x"]]


def test_a_failed_step_is_blamed_on_its_own_requests_only(breaking, parent):
    """`later` waits for a token of the budget; it is not to blame, nor stepped before the failure is reported."""
    parent.send(Add(request("fine", PROMPT)))
    parent.ended("fine")
    parent.send(Add(request("bad", PROMPT, isolate=True)), Add(request("later", PROMPT)))
    reports = parent.until(Failed)
    assert (reports[-1].message, reports[-1].in_flight, reports[-1].refused) == (
        "RuntimeError: injected",
        ["bad"],
        False,
    )
    assert ["later"] not in launching(reports)
    assert parent.leave() == 1


def test_a_cancel_and_an_add_in_one_piece_are_obeyed_in_order(parent):
    parent.send(Add(request("x", PROMPT, LONG)))
    parent.until(Stepped, lambda s: s.deltas)
    parent.send(Cancel("x"), Add(request("y", PROMPT)))
    reports = [*parent.ended("x"), *parent.ended("y")]
    deltas = [delta for report in reports if isinstance(report, Stepped) for delta in report.deltas]
    assert [delta.finish_reason for delta in deltas if delta.id == "x" and delta.finish_reason] == ["cancelled"]
    assert sum(len(delta.tokens) for delta in deltas if delta.id == "y") == GREEDY.max_tokens


def test_steps_overlap_in_a_child_too_and_all_in_flight_are_named(config, monkeypatch):
    calls: list[str] = []
    launch, collect = Runner.launch, Runner.collect
    monkeypatch.setattr(Runner, "launch", lambda self, plan: (calls.append("launch"), launch(self, plan))[1])
    monkeypatch.setattr(Runner, "collect", lambda self, handle: (calls.append("collect"), collect(self, handle))[1])
    settings = {name: getattr(config, name) for name in config.__struct_fields__}
    parent = Parent(EngineConfig(**settings | {"overlap": True, "max_step_tokens": 13}))
    parent.until(Ready)
    parent.send(Add(request("x", PROMPT)), Add(request("y", PROMPT[::-1])))
    reports = [*parent.ended("x"), *parent.ended("y")]
    assert calls[:4] == ["launch", "launch", "collect", "launch"]
    assert launching(reports)[:2] == [["x"], ["x", "y"]]
    parent.leave()
