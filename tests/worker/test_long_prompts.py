"""A prompt of up to 2 MB, or one whose template never ends, comes while a stream runs: the stream goes on."""

import random
import time

import pytest

from gllm.protocol import Done, Error
from tests.worker import text_fixtures as fixtures
from tests.worker.fake_engine import FakeEngine
from tests.worker.service_bench import ServiceBench
from worker.renderer import Renderer

STEP_SECONDS = 0.01
ROOM = 2**22


def prose(size: int) -> str:
    """Words of all lengths, few of them twice: the library remembers how it cut a word before."""
    rng = random.Random(9)
    text = bytes(rng.choices(b"etaoinshrdlu      .,\n", k=size)).decode()
    return text.replace("  ", " x")


@pytest.mark.parametrize("kind", ["prompt", "messages"])
@pytest.mark.parametrize("size", [500_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
async def test_a_stream_goes_on_while_a_long_prompt_is_tokenised(crew: ServiceBench, kind: str, size: int) -> None:
    crew.tokenizer = fixtures.smollm2()
    info = {"vocab_size": 49_152, "max_model_len": ROOM, "capacity_tokens": ROOM, "max_sequences": 4}
    worker = await crew.start(engine=FakeEngine(step_seconds=STEP_SECONDS, **info), lease=5.0)
    await crew.submit("stream", max_tokens=100_000)
    await crew.published("stream", 5)
    text = prose(size)
    long = {"prompt": text} if kind == "prompt" else {"prompt": None, "messages": [{"role": "user", "content": text}]}
    began, before = time.monotonic(), int(await crew.bench.field("stream", "n"))
    await crew.submit("long", max_tokens=1, **long)
    await crew.until(lambda: "long" in [request.id for request in worker.engine.added], "the long job's start", 60)
    took, after = time.monotonic() - began, int(await crew.bench.field("stream", "n"))

    assert len(worker.engine.added[-1].tokens) > size / 4
    assert took > 10 * STEP_SECONDS
    assert after - before > took / STEP_SECONDS / 4, f"{after - before} tokens in {took:.2f} s"
    await crew.bench.redis.set(crew.bench.keys.cancel("stream"), 1, ex=60)
    await crew.until_ended("stream")
    await crew.bench.clear_streams()


async def test_a_template_that_never_ends_costs_its_own_job_only(
    crew: ServiceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.intake.Renderer", lambda: Renderer(seconds=1.0))
    endless = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    endless += "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}"
    template = "{% if messages[0].content == 'bad' %}" + endless + "{% endif %}" + fixtures.CHATML
    crew.tokenizer = fixtures.loaded(fixtures.byte_level_backend(), chat_template=template)
    await crew.start(engine=FakeEngine(step_seconds=STEP_SECONDS), lease=5.0)
    await crew.submit("stream", max_tokens=100_000)
    await crew.published("stream", 5)

    began, before = time.monotonic(), int(await crew.bench.field("stream", "n"))
    await crew.submit("bad", prompt=None, messages=[{"role": "user", "content": "bad"}])
    await crew.submit("good", prompt=None, messages=[{"role": "user", "content": "good"}])
    good = await crew.reply("good")
    assert isinstance(good.end, Done)
    bad = await crew.reply("bad")
    took, after = time.monotonic() - began, int(await crew.bench.field("stream", "n"))

    assert isinstance(bad.end, Error)
    assert (bad.end.code, bad.end.message) == ("invalid", "messages: the chat template took more than 1 seconds")
    assert took > 0.9
    assert after - before > took / STEP_SECONDS / 4, f"{after - before} tokens in {took:.2f} s"
    await crew.bench.redis.set(crew.bench.keys.cancel("stream"), 1, ex=60)
    await crew.until_ended("stream")
    await crew.bench.clear_streams()
