"""Kill anything, lose nothing, double nothing."""

import os
from pathlib import Path

import pytest

from tests.chaos.arena import Arena, Plan, running
from tests.chaos.disturbances import LONG_DECK, SHORT_DECK
from tests.servers import first_kind

SHORT = Plan(seed=1, jobs=60, workers=3, tasks=12, threads=8, pace=0.01, deck=SHORT_DECK)
SEEDS = [int(word) for word in os.environ.get("CHAOS_SEEDS", "1").split()]
PACES = {"redis": 0.01, "valkey": 0.0}


def run(plan: Plan, kind: str, model: Path, directory: Path, queue: str) -> None:
    with running(kind, directory) as server:
        print(f"\n{Arena(plan, server, model, directory, queue).run()}")


def test_disturbed_workers_lose_and_double_nothing(multibyte_model: Path, tmp_path: Path, queue_name: str) -> None:
    run(SHORT, first_kind(), multibyte_model, tmp_path, queue_name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_thousand_jobs_under_chaos(
    server_kind: str, seed: int, multibyte_model: Path, tmp_path: Path, queue_name: str
) -> None:
    pace, shards = PACES[server_kind], 1 + seed % 3
    plan = Plan(seed=seed, jobs=1000, workers=4, tasks=24, threads=12, pace=pace, shards=shards, deck=LONG_DECK)
    run(plan, server_kind, multibyte_model, tmp_path, queue_name)
