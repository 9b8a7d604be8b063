"""What a real worker's /metrics says agrees with the replies that clients got."""

import random
import string

import pytest
from prometheus_client.parser import text_string_to_metric_families

import gllm
from tests.e2e.conftest import Start
from tests.e2e.worker_process import WorkerProcess


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
    worker = start("--prefix-cache")
    worker.wait_event("ready")
    rng = random.Random(5)
    with gllm.SyncClient(one_url, queue_name) as client:
        client.result(client.submit(prompt="warm", max_tokens=1), timeout=60)
        before = page(worker)
        lengths = [*range(1, 16), *[0] * 5]
        jobs = [
            client.submit(prompt=word(rng) * 4, max_tokens=length, ignore_eos=True, id=word(rng), tenant=word(rng))
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
