"""The worker's metrics: exact names, counts that agree, labels that stay bounded, and nothing that can stop serving."""

import ast
import math
import random
import re
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.request import Stats
from engine.wire import EngineInfo
from gllm.keys import PRIORITIES
from worker import metrics as metrics_module
from worker.backlog import Backlog
from worker.metrics import (
    BUCKETS,
    DEAD_LETTERS,
    ERROR_CODES,
    FINISH_REASONS,
    REDIS_ERRORS,
    REPAIRS,
    TAKEOVERS,
    JobClock,
    Metrics,
)

HISTOGRAMS = ("time_to_first_token", "inter_token", "job", "queue_wait")


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by `name{label="value",…}`."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def engine_info(model: str = "/models/tiny") -> EngineInfo:
    return EngineInfo(
        model=model, numerics="abc", device="cpu", dtype="float32", deterministic=True, vocab_size=64, max_model_len=64,
        block_size=4, kv_blocks=8, capacity_tokens=32, max_sequences=4, eos_token_ids=[2],
    )  # fmt: skip


def test_metric_names_are_those_of_the_design_page() -> None:
    metrics = Metrics()
    metrics.queue.claim({"normal": Backlog(3, 2)})
    names = set(samples(metrics))
    expected = {
        "gllm_prefix_cache_hit_tokens_total",
        "gllm_prefix_cache_prompt_tokens_total",
        "gllm_prefix_cache_evictions_total",
        'gllm_prefix_cache_blocks{state="live"}',
        'gllm_prefix_cache_blocks{state="reclaimable"}',
        'gllm_prefix_cache_blocks{state="free"}',
        "gllm_prompt_tokens_total",
        "gllm_generation_tokens_total",
        "gllm_preemptions_total",
        "gllm_recomputed_tokens_total",
        "gllm_resumed_tokens_total",
        'gllm_sequences{state="running"}',
        'gllm_sequences{state="waiting"}',
        'gllm_queue_depth{priority="normal"}',
        *(f'gllm_jobs_total{{outcome="{outcome}"}}' for outcome in (*FINISH_REASONS, *ERROR_CODES)),
        *(f"gllm_{name}_seconds_count" for name in HISTOGRAMS),
    }
    assert expected - names == set()
    assert not [name for name in names if "_created" in name]


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
    metrics.engine.info = engine_info("/models/first")
    metrics.engine.info = engine_info("/models/second.gguf")
    series = [name for name in samples(metrics) if name.startswith("gllm_engine_info")]
    assert len(series) == 1
    assert 'device="cpu"' in series[0]
    assert 'model="second.gguf"' in series[0]


# MX-H1: a counter gets a negative amount and the exception stops serving


@pytest.mark.parametrize("seconds", [-1.0, -0.0, -1e9])
def test_negative_duration_counts_as_zero(seconds: float) -> None:
    metrics = Metrics()
    metrics.queue_wait.observe(seconds)
    found = samples(metrics)
    assert found["gllm_queue_wait_seconds_count"] == 1
    assert found["gllm_queue_wait_seconds_sum"] == 0
    assert found["gllm_metrics_errors_total"] == 0


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_duration_that_is_no_number_is_an_error_and_not_a_sample(seconds: float) -> None:
    metrics = Metrics()
    metrics.first_token.observe(seconds)
    found = samples(metrics)
    assert found["gllm_time_to_first_token_seconds_count"] == 0
    assert found["gllm_metrics_errors_total"] == 1


def test_histogram_reads_exactly_as_the_librarys_own() -> None:
    metrics, registry, rng = Metrics(), CollectorRegistry(), random.Random(5)
    disable_created_metrics()
    theirs = Histogram("gllm_job_seconds", "From submission to the end of a job", buckets=BUCKETS, registry=registry)
    for seconds in (0.0, *BUCKETS, 1e6, *(10 ** rng.uniform(-4, 4) for _ in range(200))):
        metrics.job_seconds.observe(seconds)
        theirs.observe(seconds)
    ours = [line for line in metrics.render().decode().splitlines() if "gllm_job_seconds" in line]
    assert ours == generate_latest(registry).decode().splitlines()


def test_negative_amount_is_an_error_and_never_an_exception() -> None:
    metrics = Metrics()
    metrics.recovery("fenced", 3)
    metrics.recovery("fenced", -2)
    found = samples(metrics)
    assert found['gllm_recoveries_total{path="fenced"}'] == 3
    assert found["gllm_metrics_errors_total"] == 1


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


def test_job_that_ends_twice_or_without_tokens_breaks_nothing() -> None:
    metrics = Metrics()
    clock = JobClock(metrics, 0.0, 100.0)
    clock.tokens(0, 101.0)
    clock.tokens(-1, 101.0)
    clock.end("cancelled", 102.0)
    clock.end("cancelled", 103.0)
    found = samples(metrics)
    assert found["gllm_time_to_first_token_seconds_count"] == 0
    assert found['gllm_jobs_total{outcome="cancelled"}'] == 2


# MX-H2: hits are counted at look-up. Here: shown exactly as the engine counted them, however often they are scraped


def test_scraping_often_counts_no_hit_twice() -> None:
    metrics = Metrics()
    metrics.engine.stats = lambda: Stats(prefix_hit_tokens=8, prefix_prompt_tokens=12)
    found = [samples(metrics) for _ in range(10)][-1]
    assert found["gllm_prefix_cache_hit_tokens_total"] == 8
    assert found["gllm_prefix_cache_prompt_tokens_total"] == 12


# MX-H3: time to first token all in the lowest bucket, or its count differs from the jobs


def test_first_tokens_and_gaps_count_every_token_exactly_once() -> None:
    """20 jobs of known lengths, 5 of them fail before a token."""
    metrics = Metrics()
    lengths = [0] * 5 + list(range(1, 16))
    for job, length in enumerate(lengths):
        clock = JobClock(metrics, 0.5, 100.0 + job)
        for token in range(length):
            clock.tokens(1, 100.0 + job + 0.25 * (token + 1))
        clock.end("length" if length else "internal", 100.0 + job + 5)
    found = samples(metrics)
    assert found["gllm_time_to_first_token_seconds_count"] == 15
    assert found["gllm_time_to_first_token_seconds_sum"] == pytest.approx(15 * 0.75)
    assert found["gllm_inter_token_seconds_count"] == sum(lengths) - 15
    assert found["gllm_inter_token_seconds_sum"] == pytest.approx(0.25 * (sum(lengths) - 15))
    assert found["gllm_job_seconds_count"] == 20
    assert found["gllm_queue_wait_seconds_count"] == 20
    assert found['gllm_time_to_first_token_seconds_bucket{le="0.001"}'] == 0
    assert found['gllm_jobs_total{outcome="internal"}'] == 5


@pytest.mark.parametrize("steps", [[1], [3], [1, 4], [2, 1, 3], [5, 5]])
def test_gaps_count_when_a_step_brings_several_tokens(steps: list[int]) -> None:
    metrics = Metrics()
    clock = JobClock(metrics, 0.0, 10.0)
    for number, count in enumerate(steps):
        clock.tokens(count, 11.0 + number)
    found = samples(metrics)
    assert found["gllm_time_to_first_token_seconds_count"] == 1
    assert found["gllm_inter_token_seconds_count"] == sum(steps) - 1
    assert found["gllm_inter_token_seconds_sum"] == pytest.approx(len(steps) - 1)  # the time between the steps, once


def test_resumed_job_counts_neither_a_second_first_token_nor_the_gap_between_workers() -> None:
    metrics = Metrics()
    first = JobClock(metrics, 1.0, 100.0)
    first.tokens(1, 100.5)
    first.tokens(1, 100.6)
    second = JobClock(metrics, 20.0, 500.0, claims=2, published=2)
    second.tokens(1, 500.5)
    second.tokens(1, 500.6)
    second.end("stop", 501.0)
    found = samples(metrics)
    assert found["gllm_queue_wait_seconds_count"] == 1
    assert found["gllm_queue_wait_seconds_sum"] == 1.0
    assert found["gllm_time_to_first_token_seconds_count"] == 1
    assert found["gllm_inter_token_seconds_count"] == 2
    assert found["gllm_inter_token_seconds_sum"] == pytest.approx(0.2)
    assert found["gllm_job_seconds_sum"] == pytest.approx(21.0)  # from submission, over both workers


def test_redelivered_job_without_a_token_still_has_its_first_token_from_submission() -> None:
    metrics = Metrics()
    clock = JobClock(metrics, 9.0, 50.0, claims=3, published=0)
    clock.tokens(1, 51.0)
    found = samples(metrics)
    assert found["gllm_queue_wait_seconds_count"] == 0
    assert found["gllm_time_to_first_token_seconds_sum"] == pytest.approx(10.0)


def test_clock_of_redis_that_was_set_back_makes_no_negative_time() -> None:
    metrics = Metrics()
    clock = JobClock(metrics, -30.0, 50.0)
    clock.tokens(1, 51.0)
    clock.end("stop", 52.0)
    found = samples(metrics)
    assert found["gllm_queue_wait_seconds_sum"] == 0
    assert found["gllm_time_to_first_token_seconds_sum"] == pytest.approx(1.0)
    assert clock.timings(52.0).queue == 0


def test_timings_are_this_workers_part() -> None:
    clock = JobClock(Metrics(), 3.0, 50.0)
    assert clock.timings(50.5).first_token is None
    clock.tokens(2, 51.0)
    timings = clock.timings(54.0)
    assert (timings.queue, timings.first_token, timings.total) == (3.0, 1.0, 4.0)


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_have_finite_buckets_beyond_five_minutes(name: str) -> None:
    found = samples(Metrics())
    bounds = [float(key.split('"')[1]) for key in found if key.startswith(f"gllm_{name}_seconds_bucket")]
    assert len([bound for bound in bounds if 300 < bound < math.inf]) >= 2
    assert sorted(bounds) == [*BUCKETS, math.inf]


# MX-H4: a label copied from the job grows without end


def test_series_stay_constant_whatever_the_jobs_contain() -> None:
    metrics = Metrics()
    metrics.engine.info = engine_info()
    metrics.queue.renewal(dict.fromkeys(PRIORITIES, Backlog(2, 1, 5)), 6)
    metrics.worker.phase("something new", 0.5)
    before = set(samples(metrics))
    rng = random.Random(3)
    for _ in range(1000):
        word = "".join(rng.choices('abcdefghij"\\\n{}é', k=12))
        JobClock(metrics, rng.random(), 0.0).end(word, 1.0)
        metrics.recovery(word)
        metrics.redis_error(word)
        metrics.dead_letter(word)
        metrics.worker.phase(word, 1.0)
    found = samples(metrics)
    assert set(found) == before
    assert found['gllm_jobs_total{outcome="other"}'] == 1000
    assert found['gllm_recoveries_total{path="other"}'] == 1000
    assert found['gllm_redis_errors_total{class="other"}'] == 1000


def test_every_path_and_class_that_the_worker_counts_is_in_the_lists() -> None:
    """Else it would be counted as `other`, and nobody would know what healed."""
    known = {
        "recovery": {*TAKEOVERS, *REPAIRS},
        "redis_error": set(REDIS_ERRORS),
        "jobs": {*FINISH_REASONS, *ERROR_CODES},
        "dead_letter": set(DEAD_LETTERS),
    }
    calls = [
        (node.func.attr, node.args[0].value)
        for path in sorted(Path(metrics_module.__file__).parent.parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
        if node.func.attr in known and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    ]
    assert calls
    assert [call for call in calls if call[1] not in known[call[0]]] == []


def test_series_exist_before_the_first_event() -> None:
    found = samples(Metrics())
    assert found['gllm_jobs_total{outcome="deadline"}'] == 0
    assert found['gllm_recoveries_total{path="group_lost"}'] == 0
    assert found['gllm_redis_errors_total{class="transient"}'] == 0


def test_queue_depth_has_no_series_before_it_is_known() -> None:
    metrics = Metrics()
    assert not [name for name in samples(metrics) if re.match("gllm_queue_(depth|lag|oldest)", name)]
    metrics.queue.claim({"low": Backlog(-1, -1)})
    assert samples(metrics)['gllm_queue_depth{priority="low"}'] == 0


def test_two_metrics_in_one_process_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.jobs("stop")
    assert samples(one)['gllm_jobs_total{outcome="stop"}'] == 1
    assert samples(other)['gllm_jobs_total{outcome="stop"}'] == 0
