"""The metrics page: exact names, the rules of good names, bounded labels, and nothing that can stop serving."""

import ast
import math
import random
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric

from gllm.keys import PRIORITIES
from tests.worker.metrics_page import check_with_promtool, populated, samples
from tests.worker.text_fixtures import engine_info
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
# What Prometheus' own check of names objects to, and what its page on naming asks for beside that.
NAME = re.compile(r"gllm(_[a-z]+)+")
FORBIDDEN_WORDS = {
    *("s", "ms", "us", "ns", "sec", "msec", "min", "h", "d", "b", "kb", "mb", "gb", "kib", "mib", "gib", "bit", "bits"),
    *("milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "kilobytes", "megabytes", "gigabytes"),
    *("percent", "percentage", "counter", "gauge", "histogram", "summary", "created"),
}


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


# The rules of good names


def families() -> list[Metric]:
    return list(populated().registry.collect())


def test_names_keep_the_rules_of_prometheus() -> None:
    for family in families():
        words = family.name.split("_")
        assert NAME.fullmatch(family.name)
        assert not FORBIDDEN_WORDS & set(words), family.name
        assert family.documentation[0].isupper()
        assert not family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        if family.type != "counter":
            assert words[-1] not in ("total", "count", "sum", "bucket")
        if family.type == "histogram":
            assert words[-1] == "seconds"


def test_names_and_help_texts_are_there_once_and_so_is_every_series() -> None:
    found = families()
    assert len({family.name for family in found}) == len({family.documentation for family in found}) == len(found)
    series = [(sample.name, *sample.labels.items()) for family in found for sample in family.samples]
    assert len(set(series)) == len(series)


def test_every_family_has_samples_on_a_full_page_and_labels_are_plain_words() -> None:
    for family in families():
        assert family.samples or family.name.startswith("gllm_process"), family.name
        for sample in family.samples:
            labels = set(sample.labels) - ({"le"} if family.type == "histogram" else set())
            assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", label) and label != "quantile" for label in labels)


def test_no_number_on_a_full_page_is_negative_or_nan() -> None:
    assert [(name, value) for name, value in samples(populated()).items() if not value >= 0] == []


def test_promtool_has_nothing_against_the_page() -> None:
    if not check_with_promtool(populated().render()):
        pytest.skip("promtool is not installed (Debian and Ubuntu: in the package prometheus)")


def test_a_part_that_fails_is_counted_and_the_others_are_shown() -> None:
    metrics = populated()
    whole = set(samples(metrics))

    def broken() -> int:
        raise RuntimeError("no")

    metrics.worker.active = broken
    found = samples(metrics)
    assert found["gllm_metrics_errors_total"] == 1
    assert {name.partition("{")[0] for name in whole - set(found)} == {
        *("gllm_build_info", "gllm_worker_info", "gllm_start_time_seconds", "gllm_worker_state", "gllm_worker_ready"),
        *("gllm_startup_seconds", "gllm_jobs_active", "gllm_lease_age_seconds", "gllm_lease_seconds"),
    }


def test_observations_of_many_at_once_are_as_many_single_ones() -> None:
    one, other = Metrics(), Metrics()
    one.inter_token.observe(0.02, 5)
    for _ in range(5):
        other.inter_token.observe(0.02)
    one.inter_token.observe(7.0, 0)
    left, right = ({name: n for name, n in samples(m).items() if "inter_token" in name} for m in (one, other))
    assert left == pytest.approx(right)


@pytest.mark.parametrize("seconds", [0.1, math.nan])
def test_a_negative_number_of_observations_is_an_error(seconds: float) -> None:
    metrics = Metrics()
    metrics.inter_token.observe(seconds, -1)
    found = samples(metrics)
    assert (found["gllm_inter_token_seconds_count"], found["gllm_metrics_errors_total"]) == (0, 1)
