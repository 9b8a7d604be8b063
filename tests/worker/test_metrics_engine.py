"""The engine's numbers on the page: those of its newest snapshot, and never less than before."""

import random
import time

import pytest

from engine.request import STEP_SECONDS, Stats
from tests.worker.metrics_page import samples
from tests.worker.text_fixtures import engine_info
from worker.metrics import Metrics


def test_engine_numbers_are_those_of_the_newest_snapshot_at_each_scrape() -> None:
    metrics = Metrics()
    snapshot = Stats()
    metrics.engine.stats = lambda: snapshot
    assert samples(metrics)["gllm_prompt_tokens_total"] == 0
    snapshot = Stats(
        blocks_live=5, blocks_reclaimable=2, blocks_free=1, running=3, waiting=4, prefix_hit_tokens=32,
        prefix_prompt_tokens=96, prefix_evictions=7, prompt_tokens=64, generation_tokens=11, preemptions=2,
        preempted_tokens=40, recomputed_tokens=30, resumed_tokens=9, steps=12,
    )  # fmt: skip
    found = samples(metrics)
    assert found["gllm_prefix_cache_hit_tokens_total"] == 32
    assert found["gllm_prefix_cache_prompt_tokens_total"] == 96
    assert found["gllm_prompt_tokens_total"] == 64  # once prefilled, hit + computed = admitted
    assert found["gllm_prefix_cache_evictions_total"] == 7
    assert found["gllm_generation_tokens_total"] == 11
    assert found["gllm_preemptions_total"] == 2
    assert found["gllm_preempted_tokens_total"] == 40
    assert found["gllm_recomputed_tokens_total"] == 30
    assert found["gllm_resumed_tokens_total"] == 9
    assert found["gllm_engine_steps_total"] == 12
    assert found['gllm_sequences{state="running"}'] == 3
    assert found['gllm_sequences{state="waiting"}'] == 4
    blocks = [found[f'gllm_prefix_cache_blocks{{state="{state}"}}'] for state in ("live", "reclaimable", "free")]
    assert blocks == [5, 2, 1]


def test_snapshot_age_is_shown_once_there_is_one() -> None:
    metrics = Metrics()
    assert "gllm_engine_snapshot_age_seconds" not in samples(metrics)
    metrics.engine.stats_time = lambda: time.monotonic() - 7.0
    assert 7.0 <= samples(metrics)["gllm_engine_snapshot_age_seconds"] < 60.0
    metrics.engine.stats_time = lambda: time.monotonic() + 5.0
    assert samples(metrics)["gllm_engine_snapshot_age_seconds"] == 0


def test_engine_info_is_one_series_and_names_the_device() -> None:
    metrics = Metrics()
    metrics.engine.info = engine_info(model="/models/first")
    metrics.engine.info = engine_info(model="/models/second.gguf")
    series = [name for name in samples(metrics) if name.startswith("gllm_engine_info")]
    assert len(series) == 1
    assert 'device="cpu"' in series[0]
    assert 'model="second.gguf"' in series[0]


def test_totals_never_go_back_with_a_snapshot_that_does() -> None:
    """A resume with a larger cached part must not make the computed prompt tokens smaller than they were."""
    metrics = Metrics()
    for computed, expected in ((50, 50), (20, 50), (51, 51), (-3, 51)):
        metrics.engine.stats = lambda computed=computed: Stats(prompt_tokens=computed)
        assert samples(metrics)["gllm_prompt_tokens_total"] == expected


def test_totals_rise_monotonically_under_random_snapshots() -> None:
    metrics = Metrics()
    rng = random.Random(7)
    before = 0.0
    for _ in range(200):
        metrics.engine.stats = lambda: Stats(preemptions=rng.randrange(-100, 1000))
        now = samples(metrics)["gllm_preemptions_total"]
        assert now >= before
        before = now


def test_scrape_keeps_the_last_good_numbers_when_the_engine_has_died() -> None:
    metrics = Metrics()
    metrics.engine.stats = lambda: Stats(generation_tokens=5, running=2)
    assert samples(metrics)["gllm_generation_tokens_total"] == 5

    def dead() -> Stats:
        raise BrokenPipeError("the engine's process is gone")

    metrics.engine.stats = dead
    metrics.engine.stats_time = dead  # type: ignore[assignment]
    found = samples(metrics)
    assert found["gllm_generation_tokens_total"] == 5
    assert found['gllm_sequences{state="running"}'] == 2
    assert samples(metrics)["gllm_metrics_errors_total"] >= 2


# MX-H2: hits are counted at look-up. Here: shown exactly as the engine counted them, however often they are scraped


def test_scraping_often_counts_no_hit_twice() -> None:
    metrics = Metrics()
    metrics.engine.stats = lambda: Stats(prefix_hit_tokens=8, prefix_prompt_tokens=12)
    found = [samples(metrics) for _ in range(10)][-1]
    assert found["gllm_prefix_cache_hit_tokens_total"] == 8
    assert found["gllm_prefix_cache_prompt_tokens_total"] == 12


def test_steps_are_a_histogram_whose_sum_is_the_busy_time() -> None:
    metrics = Metrics()
    counts = [0] * (len(STEP_SECONDS) + 1)
    counts[STEP_SECONDS.index(0.01)], counts[-1] = 4, 1
    metrics.engine.stats = lambda: Stats(
        steps=5, step_ns=61_500_000_000, step_host_ns=250_000_000, step_counts=(*counts,)
    )
    found = samples(metrics)
    assert found["gllm_step_seconds_count"] == found["gllm_engine_steps_total"] == 5
    assert found["gllm_step_seconds_sum"] == pytest.approx(61.5)
    assert found["gllm_step_host_seconds_total"] == pytest.approx(0.25)
    buckets = [found[f'gllm_step_seconds_bucket{{le="{bound}"}}'] for bound in ("0.005", "0.01", "60.0", "+Inf")]
    assert buckets == [0, 4, 4, 5]


def test_tokens_of_steps_are_prefill_or_decode_and_add_up() -> None:
    metrics = Metrics()
    metrics.engine.stats = lambda: Stats(prompt_tokens=50, recomputed_tokens=7, resumed_tokens=3, decode_tokens=21)
    found = samples(metrics)
    assert found['gllm_step_tokens_total{kind="prefill"}'] == 60
    assert found['gllm_step_tokens_total{kind="decode"}'] == 21


def test_counts_of_steps_never_go_back_either() -> None:
    metrics = Metrics()
    rng, before = random.Random(3), dict[str, float]()
    for _ in range(50):
        counts = tuple(rng.randrange(-5, 100) for _ in range(len(STEP_SECONDS) + 1))
        metrics.engine.stats = lambda counts=counts: Stats(step_ns=rng.randrange(10**9), step_counts=counts)
        now = {name: value for name, value in samples(metrics).items() if name.startswith("gllm_step_seconds")}
        assert all(value >= before.get(name, 0) for name, value in now.items())
        assert now['gllm_step_seconds_bucket{le="+Inf"}'] == now["gllm_step_seconds_count"]
        before = now


def test_engine_facts_have_samples_once_it_is_loaded() -> None:
    metrics = Metrics()
    facts = ("gllm_engine_info", "gllm_engine_memory_bytes", "gllm_sequences_limit")
    assert not [name for name in samples(metrics) if name.startswith(facts)]
    metrics.engine.info = engine_info(weight_bytes=270, kv_bytes=90, max_sequences=8, device_name="Some CPU")
    found = samples(metrics)
    assert found['gllm_engine_memory_bytes{kind="weights"}'] == 270
    assert found['gllm_engine_memory_bytes{kind="kv_cache"}'] == 90
    assert found["gllm_sequences_limit"] == 8
    assert [name for name in found if 'device_name="Some CPU"' in name]
