"""Steps prepared from the device's own state, by works that a graph can hold, against steps that the host prepares.

The same engine code as on a GPU, with plain calls in place of graphs: buffers are static, and everything that the works
know of a plan is in the buffer that was sent. Same plans, so all must be the same: tokens, logits, log-probabilities.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from engine.masks import pack
from kernels import ResidentBatch, TorchBackend
from kernels.plain_resident import PlainResident
from tests.engine.driving import record_logits, request, run
from tests.engine.resident_steps import PROMPT, Schedule, assert_same, mixed_batch, record, sampling


@pytest.mark.parametrize("seed", range(10))
def test_resident_steps_are_the_hosts_steps_whatever_happens(make_resident, seed):
    """Chunks beside decodes, preemption, cancels, holds, late stops, rows and blocks used again, all ways to sample."""
    schedule = Schedule(seed)
    kind = ("llama", "qwen3", "gemma2", "llama", "gemma3_text")[seed % 5]
    dtype = "bfloat16" if seed % 3 == 2 else "float32"
    results = []
    for graphs, recording in ((False, record_logits), (True, record)):
        engine = make_resident(kind=kind, dtype=dtype, graphs=graphs, **schedule.settings)
        logits = recording(engine)
        results.append((schedule.run(engine), logits))
    assert_same(*results)
    assert sum(len(reply.tokens) for reply in results[0][0].values()) > 20


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("settings", [{}, {"max_step_tokens": 3}])
def test_all_kinds_of_sampling_in_one_batch_are_exact(make_resident, overlap, settings):
    """The sampler and the lottery side by side: whoever needs the one does not disturb those who need the other."""
    replies = [
        run(make_resident(graphs=graphs, overlap=overlap, **settings), mixed_batch()) for graphs in (False, True)
    ]
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("engine.work.RECORDS", 8), ("engine.resident.TOKENS", (2, 5)), ("engine.graphs.GRAPHS", 1)],
    ids=["more differences than a step takes", "more tokens than a graph takes", "more forms than are captured"],
)
def test_what_finds_no_room_in_a_graph_is_computed_all_the_same(make_resident, monkeypatch, name, value):
    truth = run(make_resident(graphs=False), mixed_batch())
    monkeypatch.setattr(name, value)
    if name == "engine.work.RECORDS":
        monkeypatch.setattr("engine.resident.RECORDS", value)
    assert run(make_resident(overlap=True), mixed_batch()) == truth


def test_splits_that_find_no_room_are_told_to_attention(make_resident, monkeypatch):
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
    engine = make_resident(max_sequences=8)
    run(engine, [request(f"{n}", [5 + n] * 90, sampling(4 + n)) for n in range(8)])
    assert all(needed <= room for _, room, needed in rooms)
    assert {room for decodes, room, _ in rooms if decodes} > {512, 600}  # of a place, of several; and of those outside


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0},
}


@pytest.mark.parametrize("rope", ROPES)
def test_ropes_by_row_and_by_position_are_the_hosts(make_resident, checkpoints, rope):
    """A row's frequencies depend on what its sequence may grow to; rows are used again by others."""
    model = str(checkpoints("llama", rope_parameters=ROPES[rope], max_position_embeddings=64)[0])
    jobs = [request(f"{n}", PROMPT[: 3 + 2 * n], sampling(4 + 32 * n)) for n in range(5)]
    replies = [run(make_resident(model=model, graphs=graphs, max_sequences=3), jobs) for graphs in (False, True)]
    assert replies[0] == replies[1]
    assert len(set(map(tuple, (reply.tokens for reply in replies[1].values())))) == 5


def test_the_sampler_sees_those_only_who_need_it(make_resident):
    engine = make_resident(overlap=True)
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


def test_masks_are_obeyed_beside_those_who_have_none(make_resident):
    """Sources are asked outside of the graph; one that comes with a row used again is seen."""
    requests = [request("x", PROMPT, sampling(6)), request("y", PROMPT, sampling(6, temperature=0.8))]
    replies = []
    for graphs in (False, True):
        engine = make_resident(graphs=graphs, overlap=True, max_sequences=1)
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
