"""The engine's numbers at the moment of the scrape: plain ints of its newest snapshot."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, Metric

from engine.request import STEP_SECONDS, Stats
from engine.wire import EngineInfo
from worker.metrics.names import ENGINE_LABELS, ENGINE_STATES, ENGINE_TOTALS, STEP_TOKENS
from worker.metrics.values import OnError, gauge, gauges, histogram, info, totals

T = TypeVar("T")


class EngineNumbers:
    """Set `stats` and `stats_time` (monotonic seconds) to the bridge's. Totals never go back, whatever they say."""

    def __init__(self, on_error: OnError) -> None:
        self.stats: Callable[[], Stats] = Stats
        self.stats_time: Callable[[], float | None] = lambda: None
        self.info: EngineInfo | None = None
        self._on_error = on_error
        self._latest = Stats()
        self._highest: dict[str, int] = {}

    def collect(self) -> Iterator[Metric]:
        self._latest = self._read(self.stats) or self._latest
        yield from self._totals()
        yield from self._steps()
        for name, fields, text in ENGINE_STATES:
            values = {state: getattr(self._latest, field) for state, field in fields.items()}
            yield gauges(f"gllm_{name}", text, "state", values)
        taken = self._read(self.stats_time)
        age = None if taken is None else max(0.0, time.monotonic() - taken)
        yield gauge("gllm_engine_snapshot_age_seconds", "Age of the engine's numbers", age)
        yield from _facts(self.info)

    def _read(self, source: Callable[[], T]) -> T | None:
        try:
            return source()
        except Exception:  # a scrape must not fail because the engine's side did: what was known last stands
            self._on_error()
            return None

    def _total(self, name: str, value: int) -> int:
        self._highest[name] = highest = max(self._highest.get(name, 0), value)
        return highest

    def _field(self, field: str) -> int:
        return self._total(field, getattr(self._latest, field))

    def _totals(self) -> Iterator[Metric]:
        for name, field, text in ENGINE_TOTALS:
            yield CounterMetricFamily(f"gllm_{name}", text, value=self._field(field))

    def _steps(self) -> Iterator[Metric]:
        counts = [self._total(f"step {index}", count) for index, count in enumerate(self._latest.step_counts)]
        seconds, host = self._field("step_ns") / 1e9, self._field("step_host_ns") / 1e9
        yield histogram(
            "gllm_step_seconds", "Engine steps; the sum is the time it was busy", STEP_SECONDS, counts, seconds
        )
        text = "Part of the steps in which the host neither computed nor waited for the device"
        yield CounterMetricFamily("gllm_step_host_seconds", text, value=host)
        tokens = {kind: sum(map(self._field, fields)) for kind, fields in STEP_TOKENS.items()}
        yield totals("gllm_step_tokens", "Tokens that went through the model", "kind", tokens)


def _facts(engine: EngineInfo | None) -> Iterator[Metric]:
    """What does not change while an engine lives."""
    yield info("gllm_engine_info", "What the engine is", ENGINE_LABELS, engine and _labels(engine))
    held = {"weights": engine.weight_bytes, "kv_cache": engine.kv_bytes} if engine else {}
    yield gauges("gllm_engine_memory_bytes", "What the engine holds on its device", "kind", held)
    yield gauge("gllm_sequences_limit", "Jobs that can run at the same time", engine and engine.max_sequences)


def _labels(engine: EngineInfo) -> tuple[str, ...]:
    deterministic = str(engine.deterministic).lower()
    name = Path(engine.model).name
    return name, engine.device, engine.device_name, engine.dtype, deterministic, engine.numerics
