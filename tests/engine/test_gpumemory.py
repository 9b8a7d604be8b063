"""What a GPU has room for, with the numbers of one that is not here."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from engine import Engine, EngineConfig
from engine.errors import DeviceError
from engine.gpumemory import GRAPH_BYTES, GRAPHS, SPARE_BYTES, Meter, Room, refusing
from engine.graphs import Graphs
from engine.memory import block_bytes, kv_blocks
from engine.rehearsal import EVERYTHING, largest_step
from engine.runner import Runner
from tests.engine.driving import GREEDY, request, run

GIB = 1 << 30
GPU = torch.device("cuda", 0)
MODEL = SimpleNamespace(layers=4, kv_heads=8, head_dim=128)  # a block of 16 tokens in bfloat16: 256 KiB
BLOCK = 4 * 2 * 8 * 16 * 128 * 2
ROOM = Room(total=80 * GIB, free=60 * GIB, taken=16 * GIB, workspace=2 * GIB)


@dataclass
class Gpu:
    """A GPU's books: what others hold, what this process does, and the most that it ever held."""

    total: int = 80 * GIB
    others: int = GIB
    ours: int = 0
    outside: int = 0  # of ours, what torch's allocator does not know: libraries
    cached: int = 0  # of ours, what the allocator would give back
    peak: int = 0

    def take(self, size: int, *, cached: bool = False) -> None:
        if size > self.free:
            raise torch.OutOfMemoryError(f"tried to allocate {size}")
        self.ours += size
        self.cached += size if cached else 0
        self.peak = max(self.peak, self.ours)

    def empty_cache(self) -> None:
        self.ours -= self.cached
        self.cached = 0

    @property
    def free(self) -> int:
        return self.total - self.others - self.ours - self.outside


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    card = Gpu()
    fakes = {
        "mem_get_info": lambda device: (card.free, card.total),
        "empty_cache": card.empty_cache,
        "memory_reserved": lambda device: card.ours,
        "max_memory_reserved": lambda device: card.peak,
        "reset_peak_memory_stats": lambda device: setattr(card, "peak", card.ours),
        "synchronize": lambda device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return card


def test_a_cpu_has_no_meter():
    assert Meter.of(torch.device("cpu")) is None


def test_the_largest_steps_memory_is_measured_and_given_back(gpu):
    meter = Meter(GPU)
    gpu.take(16 * GIB)
    gpu.take(9 * GIB, cached=True)  # loading left something behind: it counts neither as taken nor for the step

    def step() -> None:
        gpu.take(2 * GIB, cached=True)
        gpu.take(GIB // 2)  # state that stays
        gpu.outside += GIB // 4  # a library's

    room = meter.measure(step, "a step")
    assert room.workspace == 2 * GIB + GIB // 2
    assert room.taken == 16 * GIB + GIB // 2 + GIB // 4
    assert room.free == gpu.free == 79 * GIB - room.taken
    assert gpu.cached == 0


def test_a_step_without_room_is_refused_with_the_numbers(gpu):
    meter = Meter(GPU)
    gpu.take(78 * GIB)
    with pytest.raises(DeviceError) as refused:
        meter.measure(lambda: gpu.take(2 * GIB), "a step of 2048 tokens (max_step_tokens)")
    for number in ("2048", f"{80 * GIB}", f"{79 * GIB}", f"{78 * GIB}", f"{GIB} are free"):
        assert number in str(refused.value)


def test_weights_without_room_are_refused_and_a_cpus_error_is_left_alone(gpu):
    with pytest.raises(DeviceError, match=r"^the model m does not fit"), refusing(Meter(GPU), "the model m"):
        gpu.take(100 * GIB)
    with pytest.raises(torch.OutOfMemoryError), refusing(None, "the model m"):
        gpu.take(100 * GIB)


def test_room_for_the_pool_is_what_the_share_leaves_beside_steps_and_graphs():
    graphs = 2 * GIB + GRAPHS * GRAPH_BYTES
    assert ROOM.pool_bytes(0.5) == 40 * GIB - 16 * GIB - 2 * GIB - graphs
    assert ROOM.pool_bytes(None) == ROOM.pool_bytes(0.9)
    assert ROOM.pool_bytes(50 * GIB) == 50 * GIB - 16 * GIB - 2 * GIB - graphs
    assert ROOM.pool_bytes(1) == 60 * GIB - SPARE_BYTES - 2 * GIB - graphs  # no more than what is really free
    without = Room(total=80 * GIB, free=60 * GIB, taken=16 * GIB, workspace=2 * GIB, graphs=0)
    assert without.pool_bytes(0.5) == ROOM.pool_bytes(0.5) + graphs


def config(**settings: object) -> EngineConfig:
    return EngineConfig(**{"model": "m", "max_sequences": 10**6} | settings)


def blocks(room: Room | None = ROOM, **settings: object) -> int:
    return kv_blocks(config(**settings), MODEL, torch.bfloat16, 131072, room)


def test_blocks_fill_the_room_with_one_for_padding():
    assert block_bytes(MODEL, 16, torch.bfloat16) == BLOCK
    assert blocks(gpu_memory=0.5) == ROOM.pool_bytes(0.5) // BLOCK - 1
    assert blocks(gpu_memory=0.5, kv_memory=GIB) == GIB // BLOCK
    assert blocks(gpu_memory=0.5, kv_blocks=77) == 77
    assert blocks(gpu_memory=0.5, max_sequences=2) == 2 * 131072 // 16


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_blocks": 10**6}, f"a KV pool of 1000000 blocks of {BLOCK} bytes does not fit"),
        ({"kv_memory": 70 * GIB}, f"a KV pool of {70 * GIB // BLOCK} blocks"),
        ({"gpu_memory": 0.2}, "a KV pool of 1 blocks"),
        ({"gpu_memory": 20 * GIB}, "0 bytes are left for KV"),
        ({"kv_memory": 5}, "kv_memory: 5 bytes do not hold one KV block"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(settings, said):
    with pytest.raises(DeviceError) as refused:
        blocks(**settings)
    assert said in str(refused.value)
    if "kv_memory" not in settings or settings["kv_memory"] > 5:
        for number in (ROOM.total, ROOM.free, ROOM.taken, ROOM.workspace, ROOM.captures):
            assert f"{number}" in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "tokens", "length", "counts"),
    [
        (4, 100, 1000, [97, 1, 1, 1]),
        (4, 100, 40, [40, 40, 19, 1]),
        (4, 100, 10, [10, 10, 10, 10]),
        (4, 3, 10, [1, 1, 1]),
        (1, 8, 100, [8]),
    ],
)
def test_the_largest_step_has_all_rows_and_tokens_and_the_longest_contexts(rows, tokens, length, counts):
    plan = largest_step(rows, tokens, length)
    assert [entry.count for entry in plan.entries] == counts
    assert {entry.start + entry.count for entry in plan.entries} == {length}
    assert all(entry.samples for entry in plan.entries)
    assert [sequence.row for sequence in plan.opened] == list(range(len(counts)))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("content", [0.0, float("nan"), 3e38])
def test_a_rehearsed_engine_computes_as_any_other(make_engine, monkeypatch, content, graphs):
    """The largest step is a real one, whatever its memory held before; what it leaves behind disturbs nobody."""
    truth = run(make_engine(), [request("x", range(3, 20)), request("y", range(30, 37), GREEDY)])
    seen: list[str] = []
    reserved: list[int] = []
    make_pool = Runner._make_pool

    def fill_pool(self: Runner) -> None:
        make_pool(self)
        with torch.inference_mode():
            for layer in self.cache:
                layer.fill_(content)

    def rehearse(self: Meter, largest_step: object, what: str, captured: int) -> Room:
        assert captured == (GRAPHS if graphs else 0)
        sampled = largest_step()
        assert len(sampled.tokens) == 5
        assert all(0 <= token < 160 for token in sampled.tokens)
        assert all(len(logprob[2]) == EVERYTHING.logprobs for logprob in sampled.logprobs)
        assert len(sampled.prompt_logprobs[0]) > 50
        seen.append(what)
        return Room(total=GIB, free=GIB, taken=0, workspace=77)

    monkeypatch.setattr(Runner, "_make_pool", fill_pool)
    monkeypatch.setattr(Meter, "of", classmethod(lambda cls, device: cls(GPU)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, GIB))
    monkeypatch.setattr(Meter, "measure", rehearse)
    monkeypatch.setattr(Graphs, "reserve", lambda self, size: reserved.append(size))
    settings = {"max_sequences": 5, "graphs": graphs} | ({"kernels": "torch"} if graphs else {})
    engine: Engine = make_engine(max_step_tokens=64, **settings)
    tables = engine.runner.stepper._kept.state.tables if graphs else engine.runner.stepper.tables
    assert bool((tables == engine.runner.kv_blocks).all())  # rows of nobody write to the padding block
    assert reserved == ([77] if graphs else [])
    assert seen == ["a step of 64 tokens (max_step_tokens) of 5 sequences (max_sequences)"]
    replies = run(engine, [request("x", range(3, 20)), request("y", range(30, 37), GREEDY)])
    assert {name: reply.tokens for name, reply in replies.items()} == {n: reply.tokens for n, reply in truth.items()}
    sized = make_engine(kv_blocks=None, **settings)
    assert sized.runner.kv_blocks == 5 * 512 // 4
