"""How tests read `/metrics`, and a page on which every series has a sample."""

import shutil
import subprocess

from prometheus_client.parser import text_string_to_metric_families

from engine.request import STEP_SECONDS, Stats
from gllm.keys import PRIORITIES
from tests.worker.text_fixtures import engine_info
from worker.backlog import Backlog
from worker.metrics import JobClock, LeaseTime, Metrics
from worker.metrics.names import STARTUP_PHASES


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by `name{label="value",…}`."""
    return read(metrics.render().decode())


def read(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def check_with_promtool(page: bytes) -> bool:
    """Let Prometheus' own tool look at a page; False when it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        return False
    done = subprocess.run([program, "check", "metrics"], input=page, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    return True


def populated() -> Metrics:
    """Metrics of a worker that is at work, with every series that there can be."""
    metrics = Metrics()
    metrics.engine.info = engine_info(model="/models/tiny", device_name='A "fast" one', weight_bytes=5, kv_bytes=7)
    metrics.engine.stats = lambda: Stats(
        steps=3, step_ns=3 * 10**9, step_host_ns=10**8, step_counts=(0, 0, 3, *[0] * (len(STEP_SECONDS) - 2))
    )
    metrics.engine.stats_time = lambda: 0.0
    metrics.queue.renewal(dict.fromkeys(PRIORITIES, Backlog(3, 2, 1000)), 5000)
    metrics.worker.queue = "chat"
    metrics.worker.state = lambda: ("ready", True)
    metrics.worker.lease = lambda: LeaseTime(15.0, 0.0)
    metrics.worker.active = lambda: 2
    for phase in (*STARTUP_PHASES, "another"):
        metrics.worker.phase(phase, 0.5)
    metrics.loop_lag.observe(0.001)
    clock = JobClock(metrics, 0.5, 100.0)
    clock.tokens(3, 101.0)
    clock.tokens(2, 102.0)
    clock.end("stop", 103.0)
    return metrics
