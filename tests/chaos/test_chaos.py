"""Kill anything, lose nothing, double nothing.

Real workers with a tiny real model serve a real server that appends every command to its file before it answers.
Clients of both kinds, in tasks and in threads, submit jobs of every sort (greedy and sampled, with penalties, stops,
logprobs and text in several scripts; of all priorities, delayed, doubled, cancelled), hang up in the middle of replies
and go on from the last entry they have seen. Meanwhile workers, their engines and the server are killed, frozen for
longer than the lease, restarted, told to leave, cut off, and made to forget their scripts. What is proven then:

* every job ends with exactly one terminal event, and none is given up, at default limits of attempts;
* every client got every token once, in order, without a hole, and so did the stream itself;
* ids, text, log-probabilities, finish reason and usage are those of an engine that nobody disturbs, bit for bit;
  a cancelled job has a prefix of them, and its text is what that prefix lets out;
* a second reader gets the same; submitting again, at any time and with any priority, changes nothing;
* no worker ends, or complains at level error, without having been hurt;
* at the end streams, pending lists, dead letters, wishes to cancel and delayed jobs are empty, every key expires but
  the permanent ones, and no consumer and no worker's name is left.

Which jobs, and what is done to them in which order, is a function of the seed; when it happens is up to the machine. A
run that breaks a promise says which, and shows the jobs with their events, what was done when, and the workers' logs.

    workload  the jobs            session, clients, witness  who reads them, and what they saw
    crew      the workers         disturbances               what is done to them and to the server
    oracle    the right replies   verdict, arena             the comparison, and everything wired
"""

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


@pytest.mark.timeout(300)  # a busy machine takes its time; everything is bounded
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
