"""Steps prepared from the device's own state, by works that a graph can hold, against steps that the host prepares.

The same engine code as on a GPU, with plain calls in place of graphs: buffers are static, and everything that the works
know of a plan is in the buffer that was sent. Same plans, so all must be the same: tokens, logits, log-probabilities.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Engine, Request, SamplingParams
from engine.errors import DeviceError
from engine.graphs import PLACES, Form, Tail, at_least, capture, grid
from engine.masks import pack
from engine.plan import Plan
from engine.work import StepWork
from kernels import ResidentBatch, TorchBackend
from kernels.plain_resident import PlainResident
from tests.engine.breaking import failing_forward, nan_embedding
from tests.engine.driving import Reply, poison, record_logits, request, run, settle

Logits = dict[tuple[str, int], Tensor]
PROMPT = list(range(10, 27))
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1e-6, "top_k": 3},
    {"temperature": 0.7, "min_p": 0.1, "seed": 2**64 - 1},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1, "top_k": 40},
    {"temperature": 0.0, "logit_bias": {5: 3.0, 60: -9.0}},
    {"temperature": 0.9, "min_tokens": 4, "stop_token_ids": list(range(3, 90))},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.9, "prompt_logprobs": 0, "logprobs": 1},
)


def record(engine: Engine) -> Logits:
    """As `record_logits`, where works choose tokens themselves: row i of a step's logits is its i-th entry's."""
    recorded: Logits = {}
    launch, compute, plans = engine.runner.launch, engine.runner.logits, list[Plan]()

    def launching(plan: Plan) -> Any:
        plans.append(plan)
        return launch(plan)

    def computing(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        for entry, row in zip(plans.pop().entries if plans else (), logits.clone(), strict=False):
            if entry.samples:
                recorded[entry.sequence.id, entry.start + entry.count] = row
        return logits

    engine.runner.launch, engine.runner.logits = launching, computing
    return recorded


class Schedule:
    """Random requests that come, are cancelled, held and let go at random steps: the same ones for each engine."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.settings: dict[str, Any] = {
            "max_step_tokens": source.choice([5, 16, 40]), "max_sequences": source.choice([2, 5, 19]),
            "kv_blocks": source.choice([22, 24, 120]), "overlap": source.random() < 0.7,
            "prefix_cache": source.random() < 0.5,
        }  # fmt: skip
        shared = [source.randrange(3, 160) for _ in range(20)]
        self.requests: list[tuple[int, Request]] = []
        self.calls: list[tuple[int, str, str]] = []
        for number in range(source.randint(8, 14)):
            begin = shared[: source.choice([0, 0, 9, 20])]
            prompt = begin + [source.randrange(3, 160) for _ in range(source.choice([1, 2, 4, 17, 33]))]
            ends = [source.randrange(160) for _ in range(3)]
            kind = {"max_tokens": source.choice([0, 1, 5, 14, 30]), "stop_token_ids": ends} | source.choice(KINDS)
            kind["min_tokens"] = min(kind.get("min_tokens", 0), kind["max_tokens"])
            self.requests.append((source.randrange(25), request(f"r{number}", prompt, SamplingParams(**kind))))
            if source.random() < 0.4:
                begin = source.randrange(30)
                if source.random() < 0.5:
                    self.calls.append((begin, "cancel", f"r{number}"))
                else:
                    end = begin + source.randrange(1, 9)
                    self.calls += [(begin, "hold", f"r{number}"), (end, "unhold", f"r{number}")]

    def run(self, engine: Engine) -> dict[str, Reply]:
        replies: dict[str, Reply] = {}
        coming, calls, step = sorted(self.requests, key=lambda pair: pair[0]), sorted(self.calls), 0
        while coming or calls or engine.busy:
            while coming and coming[0][0] <= step:
                engine.add(coming.pop(0)[1])
            while calls and calls[0][0] <= step:
                _, call, name = calls.pop(0)
                getattr(engine, call)(name)
            for delta in engine.step():
                replies.setdefault(delta.id, Reply()).take(delta)
            engine.check()
            step += 1
            assert step < 2000
        assert engine.failure is None
        settle(engine)
        return replies


def assert_same(left: tuple[dict[str, Reply], Logits], right: tuple[dict[str, Reply], Logits]) -> None:
    assert left[0] == right[0]
    assert left[1].keys() == right[1].keys()
    for key, row in left[1].items():
        assert torch.equal(row, right[1][key]), key


@pytest.fixture
def make(make_engine: Any) -> Callable[..., Engine]:
    def made(**settings: Any) -> Engine:
        return make_engine(**{"kernels": "torch", "graphs": True} | settings)

    return made


@pytest.mark.parametrize("seed", range(10))
def test_resident_steps_are_the_hosts_steps_whatever_happens(make, seed):
    """Chunks beside decodes, preemption, cancels, holds, late stops, rows and blocks used again, all ways to sample."""
    schedule = Schedule(seed)
    kind = ("llama", "qwen3", "gemma2", "llama", "gemma3_text")[seed % 5]
    dtype = "bfloat16" if seed % 3 == 2 else "float32"
    results = []
    for graphs, recording in ((False, record_logits), (True, record)):
        engine = make(kind=kind, dtype=dtype, graphs=graphs, **schedule.settings)
        logits = recording(engine)
        results.append((schedule.run(engine), logits))
    assert_same(*results)
    assert sum(len(reply.tokens) for reply in results[0][0].values()) > 20


def sampling(count: int = 6, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True} | more)


def mixed_batch() -> list[Request]:
    """One request of each kind, of lengths around a block's end; those that the lottery serves are the last to end."""
    late = ({"logprobs"}, {"logit_bias"}, {"prompt_logprobs"}, {"min_tokens"}, {"repetition_penalty"})
    ends = [5 + n % 3 + 4 * (not any(names & kind.keys() for names in late)) for n, kind in enumerate(KINDS)]
    kinds = [{"max_tokens": end, "ignore_eos": True} | kind for end, kind in zip(ends, KINDS, strict=True)]
    return [request(f"k{n}", PROMPT[: 3 + n % 12], SamplingParams(**kind)) for n, kind in enumerate(kinds)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("settings", [{}, {"max_step_tokens": 3}])
def test_all_kinds_of_sampling_in_one_batch_are_exact(make, overlap, settings):
    """The sampler and the lottery side by side: whoever needs the one does not disturb those who need the other."""
    replies = [run(make(graphs=graphs, overlap=overlap, **settings), mixed_batch()) for graphs in (False, True)]
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("engine.work.RECORDS", 8), ("engine.resident.TOKENS", (2, 5)), ("engine.graphs.GRAPHS", 1)],
    ids=["more differences than a step takes", "more tokens than a graph takes", "more forms than are captured"],
)
def test_what_finds_no_room_in_a_graph_is_computed_all_the_same(make, monkeypatch, name, value):
    truth = run(make(graphs=False), mixed_batch())
    monkeypatch.setattr(name, value)
    if name == "engine.work.RECORDS":
        monkeypatch.setattr("engine.resident.RECORDS", value)
    assert run(make(overlap=True), mixed_batch()) == truth


def test_splits_that_find_no_room_are_told_to_attention(make, monkeypatch):
    """As if each key were a split: steps of long contexts are not captured, and have room for what there is."""
    rooms: list[tuple[bool, int, int]] = []
    monkeypatch.setattr(PlainResident, "splits", lambda self, lengths: sum(lengths))
    monkeypatch.setattr("engine.resident.MOST_SPLITS", 600)
    attend = TorchBackend.attention

    def attending(self: TorchBackend, q: Tensor, kv: Tensor, batch: ResidentBatch, *more: Any) -> Tensor:
        pairs = zip(batch.on_host.query_lengths, batch.on_host.lengths, strict=True)
        rooms.append((batch.decodes, batch.splits, sum(length for count, length in pairs if count == 1)))
        return attend(self, q, kv, batch, *more)

    monkeypatch.setattr(TorchBackend, "attention", attending)
    engine = make(max_sequences=8)
    run(engine, [request(f"{n}", [5 + n] * 90, sampling(4 + n)) for n in range(8)])
    assert all(needed <= room for _, room, needed in rooms)
    assert {room for decodes, room, _ in rooms if decodes} > {512, 600}  # of a place, of several; and of those outside


class Captures:
    """In place of CUDA: what was captured can be replayed, and calls the work again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.log: list[str] = []
        self.replays = 0
        graphs = engine.runner.stepper.graphs
        graphs._captures, graphs._on_compile = True, self.log.append
        monkeypatch.setattr("engine.graphs.capture", self.capture)

    def capture(self, work: StepWork, pool: object) -> Callable[[], None]:
        assert self.log[-1] == f"CUDA graph of {work.form}", "who waits for it must have been told"

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def test_each_form_is_captured_once_after_it_was_computed_and_then_replayed(make, monkeypatch):
    engine = make(overlap=True)
    captures = Captures(monkeypatch, engine)
    truth = run(make(graphs=False), mixed_batch())
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


def test_no_more_graphs_are_captured_than_memory_is_reserved_for(make, monkeypatch):
    engine = make()
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


def test_memory_of_captures_is_taken_as_one_piece_of_their_pool(make, monkeypatch):
    pools: list[object] = []
    graphs = make().runner.stepper.graphs
    graphs._captures, graphs._pool = True, "the pool"
    monkeypatch.setattr("engine.graphs.capture", lambda work, pool: pools.append((pool, work.args[0], work())))
    graphs.reserve(1000)
    assert pools == [("the pool", 1000, None)]


def test_steps_of_more_tokens_than_any_bucket_are_not_captured(make, monkeypatch):
    """They would be of a form of their own each time."""
    monkeypatch.setattr("engine.resident.TOKENS", (2, 16))
    engine = make(max_step_tokens=64)
    captures = Captures(monkeypatch, engine)
    run(engine, [request(f"{n}", PROMPT[: 9 + n], sampling(3 * n)) for n in range(4)])
    sizes = [int(said.removeprefix("CUDA graph of ").split()[0]) for said in captures.log]
    assert sizes
    assert max(sizes) <= 16


def test_a_pool_made_anew_forgets_graphs(make, monkeypatch):
    engine = make()
    captures = Captures(monkeypatch, engine)
    run(engine, [request("x", PROMPT)])
    with torch.inference_mode():
        engine.runner._make_pool()
    poison(engine)
    before = len(captures.log)
    run(engine, [request("x", PROMPT)])
    assert len(captures.log) == 2 * before


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0},
}


@pytest.mark.parametrize("rope", ROPES)
def test_ropes_by_row_and_by_position_are_the_hosts(make, checkpoints, rope):
    """A row's frequencies depend on what its sequence may grow to; rows are used again by others."""
    model = str(checkpoints("llama", rope_parameters=ROPES[rope], max_position_embeddings=64)[0])
    jobs = [request(f"{n}", PROMPT[: 3 + 2 * n], sampling(4 + 32 * n)) for n in range(5)]
    replies = [run(make(model=model, graphs=graphs, max_sequences=3), jobs) for graphs in (False, True)]
    assert replies[0] == replies[1]
    assert len(set(map(tuple, (reply.tokens for reply in replies[1].values())))) == 5


def test_an_engine_says_that_it_has_graphs(make):
    assert make().info.kernels == "torch, graphs"
    assert make(graphs=False).info.kernels == "torch"


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


def test_results_overwritten_before_they_are_read_are_an_error(make):
    """Two steps may be in flight. A third one takes the first one's place, which must not go unseen."""
    engine = make(overlap=True)
    engine._depth = 3
    replies = run(engine, [request("x", PROMPT, sampling(9))])
    assert isinstance(engine.failure, AssertionError)
    assert "overwritten" in (replies["x"].error or "")


def test_places_that_the_device_was_not_told_are_told_again(make, monkeypatch):
    """x, in row 0, fails before the device knows that it decodes; z takes its row, and y, in row 1, goes on."""
    jobs = {name: request(name, PROMPT[n:], sampling(20)) for n, name in enumerate("xyz")}
    truth = {name: run(make(), [job])[name].tokens for name, job in jobs.items()}
    engine = make(overlap=True, max_sequences=2)

    def broken(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("injected")

    def interfere(step: int) -> None:
        if step in (3, 6):
            engine.hold("x" if step == 3 else "y")
        if step == 8:
            monkeypatch.setattr("engine.resident.send", broken)
            engine.unhold("x")
            engine.add(jobs["z"])
            engine.hold("z")
        if step in (10, 15):
            engine.unhold("z" if step == 10 else "y")

    replies: dict[str, Reply] = {}
    for name in "xy":
        engine.add(jobs[name])
    for step in range(100):
        for delta in engine.step():
            replies.setdefault(delta.id, Reply()).take(delta)
        interfere(step)
    settle(engine)
    assert replies["x"].error == "the step failed: injected"
    assert {name: replies[name].tokens for name in "yz"} == {name: truth[name] for name in "yz"}


def test_who_was_held_goes_on_after_a_failed_forward(make):
    truth = run(make(), [request("x", PROMPT, sampling(20)), request("y", PROMPT[2:], sampling(20))])
    engine = make(overlap=True)

    def interfere(step: int, _: object) -> None:
        if step == 3:
            engine.hold("x")
        if step == 6:
            engine.add(request("more", PROMPT[:5], sampling(3)))
        if step == 9:
            engine.unhold("x")

    requests = [request("x", PROMPT, sampling(20)), request("y", PROMPT[2:], sampling(20))]
    with failing_forward(engine, 8):
        replies = run(engine, requests, between=interfere)
    assert replies["x"].tokens == truth["x"].tokens
    assert {replies[name].error for name in ("y", "more")} == {"the step failed: injected into the forward"}
    assert run(engine, [request("y", PROMPT[2:], sampling(20))])["y"].tokens == truth["y"].tokens


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("budget", [4, 400])
def test_what_is_not_a_number_ends_its_own_request_only(make, checkpoints, kind, budget):
    """An embedding that is NaN, in a prompt or drawn; plain models, and such whose windows soon hide it."""
    model = str(checkpoints(kind, **({"sliding_window": 3, "num_hidden_layers": 1} if kind == "mistral" else {}))[0])
    longer = PROMPT * 16  # over a tile of 256 keys, within which plain torch multiplies what is masked by 0
    requests = [request("bad", [9, 77, *longer], sampling(5)), request("x", PROMPT, sampling(9)),
                request("y", PROMPT[3:], sampling(9, temperature=0.9))]  # fmt: skip
    results = []
    for graphs in (False, True):
        engine = make(model=model, graphs=graphs, overlap=True, max_step_tokens=budget)
        with nan_embedding(engine, 77):
            replies = run(engine, requests)
        results.append((replies, engine.stats().prompt_tokens, engine.stats().steps))
    assert results[0] == results[1]
    assert "not finite" in (results[1][0]["bad"].error or "")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_end_their_own_request_only(make, value):
    truth = run(make(), [request("x", PROMPT, sampling(8))])
    engine = make(overlap=True)
    compute, steps = engine.runner.logits, []

    def broken(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        steps.append(len(logits))
        if len(steps) > 3:
            logits[0, 7] = value
        return logits

    engine.runner.logits = broken
    replies = run(engine, [request("bad", PROMPT, sampling(8)), request("x", PROMPT, sampling(8))])
    assert "not finite" in (replies["bad"].error or "")
    assert replies["bad"].tokens == truth["x"].tokens[: len(replies["bad"].tokens)]


def test_the_sampler_sees_those_only_who_need_it(make):
    engine = make(overlap=True)
    draw, seen = engine.runner._sampler.draw, list[list[str]]()

    def watched(logits: Tensor, sequences: list[Any], positions: Tensor) -> Any:
        seen.append([sequence.id for sequence in sequences])
        return draw(logits, sequences, positions)

    engine.runner._sampler.draw = watched
    short = sampling(8, min_tokens=3, stop_token_ids=list(range(3, 90)), temperature=0.9)
    jobs = [request("plain", PROMPT, sampling(9, temperature=0.9)), request("short", PROMPT, short),
            request("scored", PROMPT, sampling(5, logprobs=1))]  # fmt: skip
    run(engine, jobs)
    assert seen == [["short", "scored"]] * 3 + [["scored"]] * 2


def test_masks_are_obeyed_beside_those_who_have_none(make):
    """Sources are asked outside of the graph; one that comes with a row used again is seen."""
    requests = [request("x", PROMPT, sampling(6)), request("y", PROMPT, sampling(6, temperature=0.8))]
    replies = []
    for graphs in (False, True):
        engine = make(graphs=graphs, overlap=True, max_sequences=1)
        add = engine.scheduler.add

        def masked(sequence: Any, add: Any = add) -> None:
            if sequence.id == "y":
                sequence.mask_source = SimpleNamespace(
                    mask=lambda: pack(range(40, 50), 160), advance=lambda token: None
                )
            add(sequence)

        engine.scheduler.add = masked
        replies.append(run(engine, requests))
    assert replies[0] == replies[1]
    assert set(replies[1]["y"].tokens) <= set(range(40, 50))
    assert not set(replies[1]["x"].tokens) <= set(range(40, 50))
