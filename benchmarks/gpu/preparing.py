"""Steps prepared on the device from what it keeps of each row, against the same in Python."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line, not_built
from kernels import Resident, State, Step

ROWS, COLUMNS, BLOCK_SIZE, PADDING_BLOCK = 40, 30, 16, 9999


def check(machine: Machine, *, built: bool) -> Iterator[Line]:
    name = "step preparation"
    if not built:
        yield not_built(name, "Triton's kernels are for CUDA")
    else:
        yield from machine.attempt(name, lambda: [compare(machine.device, name)])


@torch.inference_mode()
def compare(device: torch.device, name: str) -> Line:
    """Random rows are told to the device; then it prepares two decode steps and a mixed one."""
    from kernels.triton.state import TritonResident

    resident, state, source = TritonResident(), State.make(ROWS, COLUMNS, BLOCK_SIZE, device), random.Random()
    state.clear(PADDING_BLOCK)
    places = source.sample(range(ROWS), 24)
    lengths = {row: source.randrange(COLUMNS * BLOCK_SIZE - 40) for row in places}
    tokens = {row: source.randrange(1000) for row in places}
    tables = {row: [source.randrange(PADDING_BLOCK) for _ in range(COLUMNS)] for row in places}
    count, records = _records(state, tables, lengths, tokens, places)
    resident.apply(state, count.to(device), records.to(device))
    step, wrong = Step.make(len(places) + 2, len(places) + 2, device), list[str]()
    for more in range(2):
        resident.advance(state, step)
        at = {row: lengths[row] + more for row in places}
        expected = {
            "ids": [tokens[row] for row in places],
            "positions": [at[row] for row in places],
            "blocks": [tables[row][at[row] // BLOCK_SIZE] for row in places],
            "offsets": [at[row] % BLOCK_SIZE for row in places],
            "rows": places,
            "ends": [at[row] + 1 for row in places],
        }
        wrong += _differences(step, expected, len(places))
    wrong += _mixed(resident, state, device, tables, tokens, places[:3])
    said = f"wrong: {', '.join(wrong)}"[:300] if wrong else "two decode steps and a mixed one"
    return Line(name=name, ok=not wrong, said=said)


def _mixed(
    resident: Resident,
    state: State,
    device: torch.device,
    tables: dict[int, list[int]],
    tokens: dict[int, int],
    rows: list[int],
) -> list[str]:
    """Entries of 20, 1 (its token is on the device) and 5 tokens, and room for more."""
    firsts, counts = [5, 30, 0], [20, 1, 5]
    entries = torch.tensor([[*rows, ROWS], [*firsts, 0], [*counts, 0], [0, 1, 0, 0]], dtype=torch.int32, device=device)
    sent = list(range(100, 100 + sum(counts) + 3))
    step = Step.make(len(sent), 4, device)
    resident.open(state, step, entries, torch.tensor(sent, dtype=torch.int32, device=device))
    of = [(row, first + n) for row, first, count in zip(rows, firsts, counts, strict=True) for n in range(count)]
    ids = [tokens[rows[1]] if row == rows[1] else sent[number] for number, (row, _) in enumerate(of)]
    expected = {
        "ids": ids,
        "positions": [position for _, position in of],
        "token_rows": [row for row, _ in of],
        "blocks": [tables[row][position // BLOCK_SIZE] for row, position in of],
        "offsets": [position % BLOCK_SIZE for _, position in of],
    }
    return [f"mixed {what}" for what in _differences(step, expected, len(of))]


def _records(
    state: State, tables: dict[int, list[int]], lengths: dict[int, int], tokens: dict[int, int], places: list[int]
) -> tuple[Tensor, Tensor]:
    """How many differences there are, and the differences, with rubbish behind them."""
    at = state.addresses
    records = [
        (at.tables + row * COLUMNS + index, block) for row, table in tables.items() for index, block in enumerate(table)
    ]
    records += [(at.lengths + row, lengths[row]) for row in places]
    records += [(at.last_tokens + row, tokens[row]) for row in places]
    records += [(at.places + place, row) for place, row in enumerate(places)]
    rubbish = [(7, 7)] * 100
    return torch.tensor([len(records)], dtype=torch.int32), torch.tensor(records + rubbish, dtype=torch.int32)


def _differences(step: Any, expected: dict[str, list[int]], count: int) -> list[str]:
    return [name for name, right in expected.items() if getattr(step, name)[:count].tolist() != right]
