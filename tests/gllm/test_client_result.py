"""`Client.result` and `Client.cancel` against real servers."""

import time

import pytest

from gllm.client import Client
from gllm.protocol import Tokens
from gllm.reply import JobFailed
from tests.gllm.readers import collect
from tests.gllm.scribe import Scribe


async def test_client_result_is_the_whole_reply(client: Client, scribe: Scribe) -> None:
    scribe.hello()
    result = await client.result(scribe.id)
    assert (result.id, result.text, result.ids, result.finish_reason) == (scribe.id, "Hello world", [1, 2, 3], "stop")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 3)


async def test_client_result_raises_the_jobs_error(client: Client, scribe: Scribe) -> None:
    scribe.error("too_large", "prompt: 9000 tokens, the model takes 8192")
    with pytest.raises(JobFailed, match="9000 tokens") as caught:
        await client.result(scribe.id)
    assert (caught.value.code, caught.value.retryable) == ("too_large", False)


async def test_client_result_waits_no_longer_than_told(client: Client, scribe: Scribe) -> None:
    scribe.start()
    with pytest.raises(TimeoutError):
        await client.result(scribe.id, timeout=0.2)


async def test_client_that_timed_out_can_go_on_reading(client: Client, scribe: Scribe) -> None:
    """A cancelled read must not leave its answer in the connection for the next one."""
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await client.result(scribe.id, timeout=0.05)
    scribe.hello()
    assert (await client.result(scribe.id)).text == "Hello world"


async def test_client_cancel_sets_a_wish_that_expires(client: Client, scribe: Scribe) -> None:
    scribe.start()
    assert await client.cancel(scribe.id) is True
    assert 86_000 < scribe.raw.ttl(scribe.keys.cancel(scribe.id)) <= 86_400


async def test_client_cancel_works_before_any_claim(client: Client, scribe: Scribe) -> None:
    await client.submit(prompt="x", id=scribe.id)
    assert await client.cancel(scribe.id) is True
    assert scribe.raw.get(scribe.keys.cancel(scribe.id)) == b"1"


async def test_client_cancel_of_a_delayed_job_outlives_its_wait(client: Client, scribe: Scribe) -> None:
    """A wish that is forgotten before the job's time has come would let it run."""
    due = 1000 * (int(time.time()) + 48 * 3600)
    scribe.raw.zadd(scribe.keys.delayed, {scribe.id: due})
    scribe.raw.hset(scribe.keys.job(scribe.id), "state", "delayed")
    scribe.raw.expire(scribe.keys.job(scribe.id), 60)
    assert await client.cancel(scribe.id) is True
    assert scribe.raw.pexpiretime(scribe.keys.cancel(scribe.id)) == due + 86_400_000


async def test_client_cancel_leaves_nothing_behind_for_an_ended_job(client: Client, scribe: Scribe) -> None:
    scribe.hello()
    assert await client.cancel(scribe.id) is False
    assert not scribe.raw.exists(scribe.keys.cancel(scribe.id))


async def test_client_tokens_of_a_stream_are_typed_events(client: Client, scribe: Scribe) -> None:
    scribe.hello()
    events = [reply.event for reply in await collect(client, scribe.id)]
    assert [event.ids for event in events if isinstance(event, Tokens)] == [[1], [2, 3]]
