"""What fencing and exactly-once are compared with: a writer that knows neither, an XADD for each token of each reply.

`python -m benchmarks.queue_plain SPEC` reads the same frames of the same stand-in as a worker, makes the same text and
writes the same events, awaited one by one, or those of a step in one pipeline (`pipelined`). It takes the spec of the
clients who read it, and claims nothing: its jobs are known from the start.
"""

import asyncio
import sys

import msgspec
import uvloop
from redis.asyncio import Redis

from benchmarks.queue_clients import Spec
from benchmarks.queue_engine import job_id
from engine.config import EngineConfig
from engine.request import Delta, Request, SamplingParams
from gllm.connection import connect
from gllm.keys import Keys
from gllm.protocol import Done, Timings, Tokens, Usage, encode_event
from worker import bridge
from worker.models import resolve_model
from worker.text import ReplyText
from worker.tokenizer import load_tokenizer


class Writer:
    def __init__(self, spec: Spec, redis: Redis) -> None:
        self._redis = redis
        self._keys = Keys(spec.queue)
        self._pipelined = spec.pipelined
        tokenizer = load_tokenizer(resolve_model("smollm2"))
        self._texts = {job_id(spec.run, index): ReplyText(tokenizer, []) for index in range(len(spec.lengths))}
        self._lengths = spec.lengths

    async def run(self) -> None:
        engine = bridge.Bridge()
        await engine.start(EngineConfig(model="stand-in"))
        for name, length in zip(self._texts, self._lengths, strict=True):
            engine.add(Request(id=name, tokens=[1], sampling=SamplingParams(max_tokens=length)))
        left = len(self._texts)
        async for deltas in engine.deltas():
            await self._write([entry for delta in deltas for entry in self._entries(delta)])
            left -= sum(delta.finish_reason is not None for delta in deltas)
            if not left:
                break
        await engine.close()

    def _entries(self, delta: Delta) -> list[tuple[str, bytes]]:
        reply, out = self._texts[delta.id], self._keys.out(delta.id)
        found: list[tuple[str, bytes]] = []
        for token in delta.tokens:
            n = len(reply.ids)
            reply.push([token])
            event = Tokens(first=n, at=reply.at(n), ids=[token], text=reply.between(n, n + 1))
            found.append((out, encode_event(event)))
        if delta.finish_reason is not None:
            done = Done(finish_reason="length", stop=None, text=reply.tail(), usage=Usage(), timings=Timings())
            found.append((out, encode_event(done)))
        return found

    async def _write(self, entries: list[tuple[str, bytes]]) -> None:
        if not self._pipelined:
            for out, event in entries:
                await self._redis.xadd(out, {"d": event})
            return
        async with self._redis.pipeline(transaction=False) as pipeline:
            for out, event in entries:
                pipeline.xadd(out, {"d": event})
            await pipeline.execute()


async def write(spec: Spec) -> None:
    async with connect(spec.url) as redis:
        await Writer(spec, redis).run()


def main() -> None:
    bridge.CHILD = "benchmarks.queue_engine"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(write(msgspec.json.decode(sys.argv[1], type=Spec)))


if __name__ == "__main__":
    main()
