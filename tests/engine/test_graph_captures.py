"""What is captured, when, and where its memory is; forms and buckets."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.errors import DeviceError
from engine.graphs import PLACES, Form, Tail, at_least, capture, grid
from tests.engine.driving import poison, request, run
from tests.engine.resident_steps import PROMPT, Captures, mixed_batch, sampling


def test_each_form_is_captured_once_after_it_was_computed_and_then_replayed(make_resident, monkeypatch):
    engine = make_resident(overlap=True)
    captures = Captures(monkeypatch, engine)
    truth = run(make_resident(graphs=False), mixed_batch())
    assert run(engine, mixed_batch()) == truth
    forms, steps = len(captures.log), engine.stats().steps
    assert len(set(captures.log)) == forms > 2
    assert run(engine, mixed_batch()) == truth
    assert len(captures.log) == forms, "the same steps are of the same forms"
    assert captures.replays >= steps - 5, "but for those that score their prompts"
    assert engine.runner.stepper.graphs.captured == forms
    engine.runner.stepper.graphs.replays, before = False, captures.replays
    assert run(engine, mixed_batch()) == truth
    assert captures.replays == before


def test_no_more_graphs_are_captured_than_memory_is_reserved_for(make_resident, monkeypatch):
    engine = make_resident()
    captures = Captures(monkeypatch, engine)
    monkeypatch.setattr("engine.graphs.GRAPHS", 2)
    run(engine, mixed_batch())
    assert len(captures.log) == 2


def test_work_is_captured_into_the_shared_pool(monkeypatch):
    """With a stand-in for CUDA: the work is done while a graph records, and what comes back replays that graph."""
    log: list[object] = []

    @contextmanager
    def recording(graph: Any, pool: object, capture_error_mode: str) -> Iterator[None]:
        log.append((graph.name, pool, capture_error_mode))
        yield
        log.append("recorded")

    recorded = SimpleNamespace(name="graph", replay=lambda: log.append("replayed"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: recorded)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    replay = capture(lambda: log.append("done"), "the pool")
    replay()
    # Only this thread's calls may break a capture: others of the process are none of its business.
    assert log == [("graph", "the pool", "thread_local"), "done", "recorded", "replayed"]


def test_memory_of_captures_is_taken_as_one_piece_of_their_pool(make_resident, monkeypatch):
    pools: list[object] = []
    graphs = make_resident().runner.stepper.graphs
    graphs._captures, graphs._pool = True, "the pool"
    monkeypatch.setattr("engine.graphs.capture", lambda work, pool: pools.append((pool, work.args[0], work())))
    graphs.reserve(1000)
    assert pools == [("the pool", 1000, None)]


def test_steps_of_more_tokens_than_any_bucket_are_not_captured(make_resident, monkeypatch):
    """They would be of a form of their own each time."""
    monkeypatch.setattr("engine.resident.TOKENS", (2, 16))
    engine = make_resident(max_step_tokens=64)
    captures = Captures(monkeypatch, engine)
    run(engine, [request(f"{n}", PROMPT[: 9 + n], sampling(3 * n)) for n in range(4)])
    sizes = [int(said.removeprefix("CUDA graph of ").split()[0]) for said in captures.log]
    assert sizes
    assert max(sizes) <= 16


def test_a_pool_made_anew_forgets_graphs(make_resident, monkeypatch):
    engine = make_resident()
    captures = Captures(monkeypatch, engine)
    run(engine, [request("x", PROMPT)])
    with torch.inference_mode():
        engine.runner._make_pool()
    poison(engine)
    before = len(captures.log)
    run(engine, [request("x", PROMPT)])
    assert len(captures.log) == 2 * before


def test_an_engine_says_that_it_has_graphs(make_resident):
    assert make_resident().info.kernels == "torch, graphs"
    assert make_resident(graphs=False).info.kernels == "torch"


def test_buckets_end_with_what_can_come_at_most():
    assert grid(PLACES, 5) == [1, 2, 4, 5]
    assert grid(PLACES, 1) == [1]
    assert grid(PLACES, 300)[-2:] == [256, 300]
    assert [at_least(grid(PLACES, 20), count) for count in (1, 3, 8, 9, 17, 20)] == [1, 4, 8, 16, 20, 20]


def test_a_form_says_what_it_is():
    assert str(Form(True, 8, 8, Tail.GREEDY)) == "8 decodes, greedy"
    assert str(Form(False, 64, 16, Tail.RANDOM)) == "64 tokens of 16 sequences, random"


def test_graphs_that_cannot_be_are_refused_by_name(make_engine):
    with pytest.raises(DeviceError, match="graphs: True was asked for, but not with the kernels 'cpu"):
        make_engine(graphs=True, kernels="cpu")
