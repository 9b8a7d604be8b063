"""What the spans of one job cost the worker's event loop: microseconds a job, its producer's trace sampled or not.

python -m benchmarks.spans
"""

import logging
import os
import time

from worker.active import ActiveJob
from worker.metrics import Metrics
from worker.otel import OtelTraces
from worker.queue import Claimed

JOBS = 400  # their spans fit into the SDK's queue, so that nothing is thrown away meanwhile
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
EMPTY = {"deadline_ms": None, "tenant": None, "affinity": None, "cached_tokens": None, "taken_from": ""}
NUMBERS = {"epoch": 1, "attempt": 0, "claims": 1, "published": 0, "submitted_ms": 0, "claimed_ms": 5}


def ended(flags: str) -> ActiveJob:
    """A job that has gone through every state."""
    now = time.monotonic()
    place = {"id": "a", "stream": "jobs:normal:0", "entry": "1-0", "body": b"{}", "suspect": False, "claimed": now}
    job = ActiveJob(Claimed(**place, **NUMBERS, **EMPTY, traceparent=PARENT + flags), Metrics())
    job.clock.given = job.clock.first = now
    job.clock.last = now + 0.001
    job.done("length")
    return job


def microseconds(flags: str) -> float:
    job, traces = ended(flags), OtelTraces("queue", "worker", "model")
    began = time.perf_counter()
    for _ in range(JOBS):
        traces.left(job, "length")
    seconds = time.perf_counter() - began
    traces.close()
    return seconds / JOBS * 1e6


def main() -> None:
    logging.disable(logging.CRITICAL)
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens there
    for name, flags in (("sampled", "01"), ("not sampled", "00")):
        print(f"{name:<12} {microseconds(flags):6.0f} us a job")


if __name__ == "__main__":
    main()
