"""What a real worker's /metrics says agrees with the replies that clients got."""

import random
import string
import time
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

import gllm
from tests.e2e.conftest import Start
from tests.e2e.worker_process import WorkerProcess
from tests.worker.metrics_page import check_with_promtool, read


def page(worker: WorkerProcess) -> dict[tuple[str, ...], float]:
    """Every sample by its name and label values."""
    families = text_string_to_metric_families(worker.get("/metrics")[1])
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def outcome(client: gllm.SyncClient, job: str) -> gllm.Result | str:
    try:
        return client.result(job, timeout=60)
    except gllm.JobFailed as error:
        return error.code


def word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=12))


def test_counts_agree_with_the_replies_and_series_stay_bounded(start: Start, one_url: str, queue_name: str) -> None:
    """Twenty jobs of known lengths, five of them refused; ids, tenants and texts are all different."""
    worker = start("--prefix-cache", "--log-level", "debug")
    worker.wait_event("ready")
    rng = random.Random(5)
    with gllm.SyncClient(one_url, queue_name) as client:
        client.result(client.submit(prompt="warm", max_tokens=1), timeout=60)
        before = page(worker)
        lengths = [*range(1, 16), *[0] * 5]
        jobs = [
            client.submit(
                prompt=f"canary {word(rng) * 4}", max_tokens=length, ignore_eos=True, id=word(rng), tenant=word(rng)
            )
            if length
            else client.submit(token_ids=[10**6 + rng.randrange(1000)], id=word(rng))
            for length in lengths
        ]
        results = [outcome(client, job) for job in jobs]
    after = page(worker)
    done = [result for result in results if isinstance(result, gllm.Result)]
    assert results.count("invalid") == 5
    assert [len(result.ids) for result in done] == lengths[:15]

    def gained(*key: str) -> float:
        return after[key] - before[key]

    assert gained("gllm_time_to_first_token_seconds_count") == 15
    assert gained("gllm_inter_token_seconds_count") == sum(lengths) - 15
    assert gained("gllm_job_seconds_count") == 20
    assert gained("gllm_queue_wait_seconds_count") == 20
    assert gained("gllm_time_to_first_token_seconds_sum") > 0
    assert gained("gllm_generation_tokens_total") >= sum(lengths)  # a token or two may be made after an end
    assert gained("gllm_jobs_total", "length") == 15
    assert gained("gllm_jobs_total", "invalid") == 5
    prompt = sum(result.usage.prompt_tokens for result in done)
    assert gained("gllm_prefix_cache_prompt_tokens_total") == prompt
    assert gained("gllm_prefix_cache_hit_tokens_total") + gained("gllm_prompt_tokens_total") == prompt
    assert set(after) == set(before)
    assert after[("gllm_metrics_errors_total",)] == 0
    assert after[("gllm_sequences", "running")] == after[("gllm_sequences", "waiting")] == 0
    assert after[("gllm_step_seconds_count",)] == after[("gllm_engine_steps_total",)] > 0
    assert 0 < after[("gllm_step_host_seconds_total",)] < after[("gllm_step_seconds_sum",)]
    phases = {key[1] for key in after if key[0] == "gllm_startup_seconds"}
    assert phases == {"find", "import", "model", "redis", "total"}
    wait_page(worker, lambda page: page["gllm_loop_lag_seconds_count"] > 0)
    assert after[("gllm_lease_age_seconds",)] < after[("gllm_lease_seconds",)] == 2
    assert after[("gllm_worker_ready",)] == after[("gllm_worker_state", "ready")] == 1
    assert after[("gllm_worker_info", queue_name)] == 1
    assert after[("gllm_sequences_limit",)] == 64
    assert {key[1] for key in after if key[0] == "gllm_process_cpu_seconds_total"} in ({"worker", "engine"}, set())
    check_with_promtool(worker.get("/metrics")[1].encode())
    assert "canary" not in worker.said


@pytest.mark.parametrize("cache", ["--prefix-cache", "--no-prefix-cache"])
def test_hits_are_the_cached_tokens_of_the_replies(start: Start, one_url: str, queue_name: str, cache: str) -> None:
    worker = start(cache)
    worker.wait_event("ready")
    shared = [3 + index % 200 for index in range(100)]
    with gllm.SyncClient(one_url, queue_name) as client:
        results = [
            client.result(client.submit(token_ids=[*shared, suffix], max_tokens=3, ignore_eos=True), timeout=60)
            for suffix in (7, 8, 9)
        ]
    found = page(worker)
    cached = [result.usage.cached_tokens for result in results]
    assert cached == ([0, 96, 96] if cache == "--prefix-cache" else [0, 0, 0])
    assert found[("gllm_prefix_cache_hit_tokens_total",)] == sum(cached)
    assert found[("gllm_prefix_cache_prompt_tokens_total",)] == 303
    assert found[("gllm_prompt_tokens_total",)] == 303 - sum(cached)
    blocks = [found[("gllm_prefix_cache_blocks", state)] for state in ("live", "reclaimable", "free")]
    assert sum(blocks) == 64
    assert blocks[0] == 0


def wait_page(worker: WorkerProcess, ready: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The first page that shows what is waited for."""
    end = time.monotonic() + 60
    while not ready(found := read(worker.get("/metrics")[1])):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def at_rest(page: dict[str, float]) -> bool:
    """Whether nothing is left of any job."""
    gone = ("gllm_jobs_active", 'gllm_sequences{state="running"}', 'gllm_sequences{state="waiting"}')
    return [page[name] for name in (*gone, 'gllm_prefix_cache_blocks{state="live"}')] == [0, 0, 0, 0]


def balances(page: dict[str, float]) -> None:
    """What a page says agrees with itself, at any time."""
    assert [(name, value) for name, value in page.items() if not value >= 0] == []
    gone = page['gllm_recoveries_total{path="fenced"}'] + page["gllm_jobs_released_total"] + page["gllm_jobs_active"]
    assert page["gllm_jobs_claimed_total"] == page["gllm_job_seconds_count"] + gone
    tokens = [page[f"gllm_{kind}_tokens_total"] for kind in ("prompt", "recomputed", "resumed")]
    assert page['gllm_step_tokens_total{kind="prefill"}'] == sum(tokens)
    assert page["gllm_step_seconds_count"] == page["gllm_engine_steps_total"]
    blocks = [page[f'gllm_prefix_cache_blocks{{state="{place}"}}'] for place in ("live", "reclaimable", "free")]
    assert sum(blocks) == 26


def test_books_balance_after_preemptions_cancels_and_a_killed_worker(
    start: Start, one_url: str, queue_name: str
) -> None:
    """A pool of 416 tokens for jobs of 392 each; the second worker takes over what the first, killed, had."""
    first = start("--kv-blocks", "26", "--lease", "0.6")
    first.wait_event("ready")
    with gllm.SyncClient(one_url, queue_name) as client:
        jobs = [client.submit(prompt=f"{n} abcdefghij", max_tokens=380, ignore_eos=True) for n in range(3)]
        wait_page(first, lambda page: page["gllm_preemptions_total"] > 0)
        client.cancel(jobs.pop())
        seen = wait_page(first, lambda page: page['gllm_jobs_total{outcome="cancelled"}'] > 0)
        first.end()
        second = start("--kv-blocks", "26", "--lease", "0.6")
        results = [client.result(job, timeout=60) for job in jobs]
    assert [len(result.ids) for result in results] == [380, 380]
    found = wait_page(second, at_rest)
    balances(seen)
    balances(found)
    assert seen["gllm_preempted_tokens_total"] > 0
    assert seen["gllm_jobs_active"] >= found['gllm_recoveries_total{path="redelivered"}'] >= 1
    assert found["gllm_resumed_tokens_total"] > 0
