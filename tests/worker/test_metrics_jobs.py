"""The latencies of jobs: their counts agree with jobs and tokens, on one worker and over several."""

import pytest

from tests.worker.metrics_page import samples
from worker.metrics import JobClock, Metrics

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
