"""Stands in for `gllm worker` in tests of the demo: no model, the same log and the same reply streams.

Usage: demo_stand_in.py MODE QUEUE, where MODE says how it behaves; Redis is GLLM_REDIS.
"""

import json
import os
import signal
import sys
import time

from gllm.connection import connect_sync
from gllm.keys import Keys
from gllm.protocol import TERMINAL_ENTRY_ID, Done, Error, ReplyEvent, Start, Timings, Tokens, Usage, encode_event
from gllm.validate import decode_job

ANSWER = "It is Paris. " * 10
PROMPT_TOKENS = 400


def log(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, "level": "info", **fields}), file=sys.stderr, flush=True)


class StandIn:
    def __init__(self, mode: str, queue: str) -> None:
        self.mode = mode
        self.keys = Keys(queue)
        self.redis = connect_sync(os.environ["GLLM_REDIS"])
        self.served = 0

    def serve(self) -> None:
        jobs, last = self.keys.jobs("normal", 0), "0-0"
        while True:
            for entry, fields in self.redis.xrange(jobs, f"({last}"):
                assert decode_job(fields[b"body"]).messages
                self.answer(fields[b"id"].decode())
                last = entry.decode()
            time.sleep(0.01)

    def answer(self, job_id: str) -> None:
        cached = 384 if self.served else 0
        self.served += 1
        if self.mode == "dies" and self.served == 3:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(9)
        self.write(
            job_id, "0-1", Start(worker="w", attempt=1, numerics="", prompt_tokens=PROMPT_TOKENS, cached_tokens=cached)
        )
        if self.mode == "errors" and self.served == 2:
            self.write(job_id, TERMINAL_ENTRY_ID, Error(code="internal", message="NaN logits"))
            return
        words = ANSWER.split(" ")[:-1]
        for n, word in enumerate(words):
            at = len(" ".join(words[:n])) + (n > 0)
            self.write(job_id, f"{n + 1}-0", Tokens(first=n, at=at, ids=[n], text=word + " "))
        usage = Usage(prompt_tokens=PROMPT_TOKENS, cached_tokens=cached, completion_tokens=len(words))
        ended = Done(finish_reason="stop", stop=None, text="", usage=usage, timings=Timings())
        self.write(job_id, TERMINAL_ENTRY_ID, ended)

    def write(self, job_id: str, entry: str, event: ReplyEvent) -> None:
        self.redis.xadd(self.keys.out(job_id), {"d": encode_event(event)}, id=entry)


def main(mode: str, queue: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3 if mode == "bad_end" else 0))
    log("starting")
    if mode == "refuses":
        log("engine_refused", level="error", message="model: no file 'x'")
        sys.exit(2)
    if mode == "never_ready":
        time.sleep(60)
    log("engine_loading", phase="weights", seconds=0.25)
    log("ready", url="http://127.0.0.1:1")
    StandIn(mode, queue).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
