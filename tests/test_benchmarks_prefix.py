"""The prefix cache's benchmark: what it reads, what it replays, and that its best offline eviction is the best."""

import json
import random
import subprocess
import sys
from array import array
from functools import cache
from pathlib import Path

import pytest

from benchmarks.offline import Future, OfflinePool
from benchmarks.replay import Replay
from benchmarks.trace import Job, Scale, block_tokens, ideal_hit_rate, shared_trace, synthesise, thin
from engine.blocks import BlockPool
from tests.engine import models
from worker.load.traces import Request

ROOT = Path(__file__).resolve().parent.parent
WORDS = range(100, 5000)


def bench(*options: str, blocked: str = "") -> dict[str, dict[str, dict]]:
    """The benchmark's figures by section and name, from a process of its own."""
    guard = f"import sys; sys.modules[{blocked!r}] = None; " if blocked else "import sys; "
    code = f"{guard}sys.argv[1:] = {[*options, '--json', '-']!r}; from benchmarks.prefix import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["environment"]["python"]
    return {section: {f["name"]: f for f in figures} for section, figures in report["results"].items()}


def test_costs_and_hit_rates_need_no_torch() -> None:
    found = bench("--only", "costs,d", "--requests", "300", "--rounds", "1", "--pools", "2048,128", blocked="torch")
    assert list(found) == ["costs", "d"]
    assert found["costs"]["look-up of 100,000 tokens"]["value"] > 0
    rates = {name: figure["value"] for name, figure in found["d"].items() if name.startswith("hit rate")}
    assert 0 < rates["hit rate, 2,048 blocks"] <= rates["hit rate, 2,048 blocks, evicting by the future"]
    assert rates["hit rate, 2,048 blocks, evicting by the future"] <= rates["hit rate, unlimited, 16 at a time"]
    assert "hit rate, 128 blocks" not in rates, "the longest request could never run there"


def test_cache_on_and_off_are_measured_on_a_model(tmp_path: Path) -> None:
    models.save(tmp_path, "llama")
    found = bench("--only", "c,a,b", "--quick", "--rounds", "1", "--threads", "1", "--model", str(tmp_path))
    assert list(found) == ["a", "b", "c"]
    assert found["a"]["what the cache costs of all the time"]["limit"] == 1.0
    assert found["b"]["hit rate, prefix known"]["value"] == pytest.approx(100 * 96 / 112)
    assert 50 < found["c"]["hit rate"]["value"] < 100


def test_a_trace_that_says_nothing_of_shared_prefixes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,600,5\n")
    with pytest.raises(ValueError, match=r"azure\.csv: hash_ids expected, 1 of 1 requests have none"):
        shared_trace(path)


@pytest.mark.parametrize(("context", "width"), [(8192, 32), (1024, 4), (200_000, 512), (4096, 16)])
def test_the_longest_request_fits_the_context_and_structure_stays(context: int, width: int) -> None:
    requests = [
        Request(0.0, 126_000, 2000, tuple(range(247))),
        Request(1.0, 1024, 100, (0, 1)),
        Request(2.0, 1300, 1, (0, 1, 500)),
    ]
    scale = Scale.fitting(requests, context)
    assert scale.width == width
    jobs = [scale.job(request, WORDS) for request in requests]
    assert max(len(job.prompt) + job.new_tokens for job in jobs) <= context
    assert jobs[0].prompt[: 2 * width] == jobs[1].prompt == jobs[2].prompt[: 2 * width]
    assert jobs[0].prompt[2 * width : 3 * width] != jobs[2].prompt[2 * width : 3 * width]
    with pytest.raises(ValueError, match="context: 100 tokens"):
        Scale.fitting(requests, 100)


def test_tokens_of_a_block_depend_on_its_id_alone() -> None:
    assert block_tokens(7, 32, WORDS) == block_tokens(7, 32, WORDS)
    assert len({tuple(block_tokens(number, 16, WORDS)) for number in range(5000)}) == 5000
    assert set(block_tokens(9, 5000, range(10, 20))) == set(range(10, 20))


def test_the_made_up_trace_is_the_same_each_time_and_shares_prefixes() -> None:
    requests = synthesise(500, seed=3)
    assert requests == synthesise(500, seed=3) != synthesise(500, seed=4)
    assert all(len(request.blocks) == -(-request.prompt_tokens // 512) for request in requests)
    assert 0.2 < ideal_hit_rate(requests) < 0.7


def test_a_thinned_trace_keeps_whole_conversations_and_their_hits() -> None:
    requests = synthesise(4000, seed=2)
    part = thin(requests, 400)
    assert 400 <= len(part) < 500
    assert part == thin(requests, 400) != thin(requests, 400, seed=1)
    assert [request.at for request in part] == sorted(request.at for request in part)
    chats = {tuple(request.blocks[:2]) for request in part}
    assert part == [request for request in requests if tuple(request.blocks[:2]) in chats]


def random_jobs(generator: random.Random, count: int, most: int) -> list[Job]:
    """Paths in a small tree, each block of two tokens, and one token more, so that every block can be matched."""
    jobs: list[Job] = []
    for _ in range(count):
        path = [generator.randrange(2) for _ in range(generator.randint(1, most))]
        jobs.append(Job(array("i", [token for step in path for token in (step, 7)] + [9]), 1))
    return jobs


def best_hits(jobs: list[Job], size: int) -> int:
    """Most tokens that any choice of what to keep could have served, by trying them all."""
    paths = [[tuple(job.prompt[: 2 * (end + 1)]) for end in range(len(job.prompt) // 2)] for job in jobs]

    @cache
    def best(number: int, kept: frozenset) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        found = next((index for index, prefix in enumerate(path) if prefix not in kept), len(path))
        spare = size - len(path) - 1  # the odd token's block is needed, too
        rest = sorted(kept - set(path))
        choices = {frozenset(rest)} if len(rest) <= spare else set(combinations_of(rest, spare))
        return 2 * found + max(best(number + 1, choice | frozenset(path)) for choice in choices)

    return best(0, frozenset())


def combinations_of(items: list, count: int) -> list[frozenset]:
    if count == 0:
        return [frozenset()]
    return [
        frozenset({item}) | rest
        for index, item in enumerate(items)
        for rest in combinations_of(items[index + 1 :], count - 1)
    ]


def test_eviction_by_the_future_is_the_best_there_is_and_never_worse_than_ours() -> None:
    generator = random.Random(1)
    better = 0
    for _ in range(60):
        jobs, size = random_jobs(generator, 9, 3), generator.randint(4, 7)
        pool = OfflinePool(size, 2, Future(jobs, 2))
        replay = Replay(jobs, pool, rows=1)
        pool.admitted = lambda replay=replay: replay.admitted
        offline = replay.run()
        pool.check([])
        ours = Replay(jobs, BlockPool(size, 2), rows=1).run()
        assert ours.hits <= offline.hits == best_hits(jobs, size)
        better += ours.hits < offline.hits
    assert better > 10


def test_a_replay_counts_every_prompt_token_once() -> None:
    requests = synthesise(200, seed=1)
    scale = Scale.fitting(requests, 1024)
    jobs = [scale.job(request, WORDS) for request in requests]
    outcome = Replay(jobs, BlockPool(300, 4), rows=8, step_tokens=64).run()
    assert outcome.prompts == sum(len(job.prompt) for job in jobs)
    assert outcome.preemptions > 0
    assert 0 < outcome.hits < outcome.prompts
