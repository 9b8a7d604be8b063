"""SmolLM2's real weights at work: with the cache on, every reply and every bit of every logit is what it is without.

The structure is that of a Mooncake trace (shared prefixes, chats of several turns, a long tail of lengths), scaled
down. The pool is small, so that blocks are evicted and sequences preempted all the time. For the long test, GLLM_TRACE
names a trace and GLLM_TRACE_REQUESTS about how many of its requests to take; without a trace it makes one up.
"""

import os
from pathlib import Path

import pytest

from benchmarks.trace import Job, Scale, shared_trace, synthesise, thin
from tests.engine import models
from tests.engine.workload import WORDS, Day, assert_exact, assert_same
from worker.load.traces import Request


def jobs(requests: list[Request], context: int, least: int, block_size: int) -> list[Job]:
    """Scaled to a context; replies of at least `least` tokens, or there would be little to compare."""
    scale = Scale.fitting(requests, context - 2 * least, block_size)
    scaled = [scale.job(request, WORDS) for request in requests]
    return [Job(job.prompt, max(job.new_tokens, least + number % least)) for number, job in enumerate(scaled)]


def blocks(job: Job, block_size: int) -> int:
    return -(-(len(job.prompt) + job.new_tokens) // block_size)


@pytest.fixture
def prove(make_engine):
    """prove(jobs, **settings): both days, compared; returns them, cache off and on."""

    def compare(work: list[Job], **settings: object) -> tuple[Day, Day]:
        settings = {"model": models.smollm2()} | settings
        off, on = (Day(make_engine(**settings, prefix_cache=cache), work).serve() for cache in (False, True))
        assert_same(off, on)
        assert_exact(off)
        assert_exact(on)
        assert off.engine.stats().prefix_hit_tokens == off.engine.stats().prefix_evictions == 0
        assert on.engine.stats().prefix_hit_tokens > 0
        assert on.engine.stats().prefix_evictions > 0
        return off, on

    return compare


@pytest.mark.parametrize(("dtype", "count", "least"), [("bfloat16", 26, 12), ("float32", 10, 8)])
def test_a_small_day_of_the_real_model_is_the_same_bits_with_cache_on_and_off(prove, dtype, count, least):
    work = jobs(synthesise(count, seed=5), 230, least, 8)
    days = prove(work, dtype=dtype, block_size=8, kv_blocks=30, max_sequences=6, max_step_tokens=96)
    off, on = (day.engine.stats() for day in days)
    assert min(off.preemptions, on.preemptions, on.recomputed_tokens) > 0
    assert on.prompt_tokens < 0.7 * off.prompt_tokens, "the cache hardly served anything"


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(("dtype", "context"), [("bfloat16", 8192), ("float32", 1024)])
def test_a_long_day_of_the_real_model_is_the_same_bits_with_cache_on_and_off(prove, dtype, context):
    path, count = os.environ.get("GLLM_TRACE"), int(os.environ.get("GLLM_TRACE_REQUESTS", "100"))
    requests = thin(shared_trace(Path(path)), count) if path else synthesise(count, seed=11)
    block_size = 16 if context > 2000 else 8
    work = jobs(requests, context, 8, block_size)
    needs = sorted(blocks(job, block_size) for job in work)
    small = max(needs[-1] + 2, sum(needs) // 6)  # the longest request fits, and no block is safe for long
    days = prove(work, dtype=dtype, block_size=block_size, kv_blocks=small, max_sequences=8, max_step_tokens=512)
    for day in days:
        print(day.engine.stats())
