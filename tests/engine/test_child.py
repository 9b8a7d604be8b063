"""The bridge and a real engine process while all is well. One process serves all tests."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine import EngineConfig, FinishReason, SamplingParams
from tests.engine.driving import GREEDY, request, run
from tests.engine.talking import Talk

PROMPT = list(range(20, 33))
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def config(checkpoints) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoints()[0]), device="cpu", dtype="float32", block_size=4, kv_blocks=256, threads=1,
        prefix_cache=True,
    )  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(config) -> AsyncIterator[Talk]:
    talk = Talk()
    await talk.start(config)
    yield talk
    await talk.close()


@module_loop
async def test_a_child_gives_the_tokens_of_an_engine_in_process(shared, make_engine):
    seeded = SamplingParams(max_tokens=12, temperature=1.3, seed=2**64 - 1, logprobs=2, ignore_eos=True)
    scored = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1, logit_bias={7: 2.5}, ignore_eos=True)
    jobs = [request(f"same{i}", PROMPT[i:], sampling) for i, sampling in enumerate((GREEDY, seeded, scored))]
    truth = run(make_engine(prefix_cache=True), jobs)
    for job in jobs:
        shared.bridge.add(job)
    assert shared.bridge.busy
    await shared.ended(*(job.id for job in jobs))
    for job in jobs:
        mine, right = shared.replies[job.id], truth[job.id]
        assert (mine.tokens, mine.finish_reason) == (right.tokens, right.finish_reason)
        assert [row[:2] for row in mine.logprobs] == [row[:2] for row in right.logprobs]
        assert (mine.prompt_logprobs is None) == (right.prompt_logprobs is None)
    assert not shared.bridge.busy


@module_loop
async def test_a_started_child_says_what_it_is_and_how_long_it_took(shared, config):
    assert [phase.phase for phase in shared.bridge.loading] == ["import", "model"]
    assert all(phase.seconds >= 0 for phase in shared.bridge.loading)
    info = shared.bridge.info
    assert (info.model, info.device, info.dtype, info.vocab_size) == (config.model, "cpu", "float32", 160)
    assert (info.kv_blocks, info.capacity_tokens, info.max_model_len) == (256, 1024, 512)


@module_loop
async def test_a_cancel_mid_way_ends_the_request_once(shared):
    shared.bridge.add(request("stopped", PROMPT, LONG))
    await shared.until(lambda: "stopped" in shared.replies and len(shared.replies["stopped"].tokens) > 3)
    shared.bridge.cancel("stopped")
    shared.bridge.cancel("stopped")
    await shared.ended("stopped")
    reply = shared.replies["stopped"]
    assert (reply.finish_reason, reply.ends) == (FinishReason.CANCELLED, 1)
    assert len(reply.tokens) < 400
    await shared.until(lambda: shared.bridge.stats.blocks_live == 0 and not shared.bridge.busy)


@module_loop
async def test_a_request_may_come_back_after_the_last_word_of_its_cancel(shared):
    """Lost and claimed again: what the engine still says of the first life must not reach the second."""
    bridge = shared.bridge
    for life in range(6):
        shared.replies.pop("phoenix", None)
        bridge.add(request("phoenix", PROMPT[life % 2 :], LONG))
        with pytest.raises(AssertionError, match="phoenix is in the engine already"):
            bridge.add(request("phoenix", PROMPT))
        if life % 3:
            await shared.until(lambda: "phoenix" in shared.replies and shared.replies["phoenix"].tokens)
        bridge.cancel("phoenix")
        await shared.ended("phoenix")
    shared.replies.pop("phoenix")
    bridge.add(request("phoenix", PROMPT))
    bridge.add(request("witness", PROMPT))
    await shared.ended("phoenix", "witness")
    assert shared.replies["phoenix"].tokens == shared.replies["witness"].tokens
    assert shared.replies["phoenix"].finish_reason is FinishReason.LENGTH
    assert not bridge.busy


@module_loop
async def test_a_held_request_stands_still_in_the_child_and_goes_on(shared):
    shared.bridge.add(request("held", PROMPT, LONG))
    await shared.until(lambda: "held" in shared.replies and shared.replies["held"].tokens)
    shared.bridge.hold("held")
    shared.bridge.add(request("free", PROMPT[:5]))  # commands are obeyed in order: once it ends, the hold is in force
    await shared.ended("free")
    count = len(shared.replies["held"].tokens)
    shared.bridge.add(request("free2", PROMPT[:6]))
    await shared.ended("free2")
    assert len(shared.replies["held"].tokens) == count
    assert shared.bridge.busy
    shared.bridge.unhold("held")
    await shared.ended("held")
    assert len(shared.replies["held"].tokens) == 400


@module_loop
@pytest.mark.parametrize(
    ("tokens", "sampling", "refusal", "said"),
    [
        ([5, 10**6], GREEDY, "invalid", "tokens: token id 1000000"),
        ([], GREEDY, "invalid", "tokens: "),
        (PROMPT, SamplingParams(temperature=-1.0), "invalid", "temperature: "),
        ([5] * 512, GREEDY, "too_large", "tokens: 512"),
    ],
)
async def test_an_invalid_add_comes_back_as_an_error(shared, tokens, sampling, refusal, said):
    shared.replies.pop("wrong", None)
    shared.bridge.add(request("wrong", tokens, sampling))
    await shared.ended("wrong")
    reply = shared.replies["wrong"]
    assert reply.finish_reason is FinishReason.ERROR
    assert reply.refusal == refusal
    assert reply.error.startswith(said)
    assert not shared.bridge.busy


@module_loop
async def test_an_idle_child_sends_snapshots(shared):
    shared.bridge.add(request("before", PROMPT))
    await shared.ended("before")
    for _ in range(2):
        seen = shared.bridge.stats_time
        await shared.until(lambda seen=seen: shared.bridge.stats_time > seen, seconds=5.0)
    stats = shared.bridge.stats
    assert (stats.running, stats.waiting, stats.blocks_live) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_reclaimable == 256


@module_loop
async def test_the_cache_of_a_child_can_be_cleared(shared):
    for name in ("warm1", "warm2"):
        shared.bridge.add(request(name, PROMPT))
        await shared.ended(name)
    assert shared.replies["warm2"].usage.cached_tokens == 12
    shared.bridge.clear_cache()
    shared.bridge.add(request("cold", PROMPT))
    await shared.ended("cold")
    assert shared.replies["cold"].usage.cached_tokens == 0
