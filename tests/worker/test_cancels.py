"""Jobs that end early: cancelled in every state, or at their deadline."""

import threading

import pytest

from gllm.protocol import Done
from tests.worker.fake_engine import text_of
from tests.worker.queue_bench import now_ms
from tests.worker.service_bench import ServiceBench

HELLO = [3 + byte for byte in b"hello"]


async def test_cancel_while_a_job_is_prepared_keeps_it_out_of_the_engine(
    crew: ServiceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.intake import Intake

    cancelled, real = threading.Event(), Intake.prepare

    def prepare(self: Intake, *args: object) -> object:
        assert cancelled.wait(10)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Intake, "prepare", prepare)
    worker = await crew.start()
    await crew.submit("a")
    await crew.until(lambda: worker.jobs, "the claim")
    await crew.bench.redis.set(crew.bench.keys.cancel("a"), 1, ex=86400)
    reply = await crew.reply("a")
    cancelled.set()
    await crew.submit("b")
    await crew.reply("b")

    assert isinstance(reply.end, Done)
    assert (reply.end.finish_reason, reply.ids) == ("cancelled", [])
    assert [request.id for request in worker.engine.added] == ["b"]


async def test_cancel_while_running_ends_the_reply_with_what_was_made(crew: ServiceBench) -> None:
    worker = await crew.start()
    await crew.submit("a", max_tokens=4000)
    await crew.published("a", 5)
    await crew.bench.redis.set(crew.bench.keys.cancel("a"), 1, ex=86400)

    reply = await crew.reply("a")

    assert isinstance(reply.end, Done)
    assert (reply.end.finish_reason, reply.end.usage.completion_tokens) == ("cancelled", len(reply.ids))
    assert reply.text == text_of(reply.ids)
    assert 5 <= len(reply.ids) < 4000
    assert worker.engine.cancelled == ["a"]
    await crew.bench.clear_streams()


async def test_cancel_of_a_job_without_tokens_is_seen_at_the_next_renewal(crew: ServiceBench) -> None:
    worker = await crew.start()
    worker.engine.go.clear()
    await crew.submit("a")
    await crew.until(lambda: worker.engine.added, "the job in the engine")
    await crew.bench.redis.set(crew.bench.keys.cancel("a"), 1, ex=86400)

    reply = await crew.reply("a")

    assert isinstance(reply.end, Done)
    assert (reply.end.finish_reason, reply.ids) == ("cancelled", [])


async def test_deadline_ends_a_running_job(crew: ServiceBench) -> None:
    await crew.start()
    deadline = await now_ms(crew.bench.redis) + 300
    await crew.submit("a", max_tokens=4000, entry={"deadline": deadline})

    reply = await crew.reply("a")

    assert isinstance(reply.end, Done)
    assert reply.end.finish_reason == "deadline"
    assert reply.end.usage.completion_tokens == len(reply.ids) > 0
    assert deadline <= await now_ms(crew.bench.redis) < deadline + 2000
