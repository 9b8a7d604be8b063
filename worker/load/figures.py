"""The figures of a load, out of its records. Pure functions.

A percentile is the smallest value that so many percent of all values do not exceed: one that was measured, never one in
between.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from msgspec import Struct

from worker.load.record import Record

PERCENTS = (50, 90, 99)


class Latency(Struct, frozen=True, kw_only=True):
    """Seconds; None where there are none."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    longest: float | None = None


class Figures(Struct, frozen=True, kw_only=True):
    """`seconds`: from when the first job was due to the last event. Tokens a second are over all of it.

    Latencies of a job count from when it was due: `lateness` until it was sent, which is this generator's own doing;
    `submit` is the XADD's round trip; `queue_wait` until its start was read, `first_token`, `end_to_end` (of jobs that
    ended well). `inter_token`: one value a token but each reply's first; tokens that came in one event share the time
    since the one before.
    """

    seconds: float
    jobs: int
    well: int
    jobs_per_second: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    prompt_tokens_per_second: float
    tokens_per_second: float
    hit_rate: float | None
    preemptions: int
    resumed: int
    outcomes: dict[str, int]
    latencies: dict[str, Latency]


def figures(records: Sequence[Record], began: float, finished: float) -> Figures:
    """Of all that was due so far."""
    heard = [moment for record in records for moment in (record.ended, record.last) if moment is not None]
    seconds = max(0.0, max(heard, default=finished) - began)
    prompt = sum(record.prompt_tokens for record in records)
    cached = sum(record.cached_tokens for record in records)
    tokens = sum(record.tokens for record in records)
    well = sum(record.well for record in records)
    return Figures(
        seconds=seconds,
        jobs=len(records),
        well=well,
        jobs_per_second=_per(well, seconds),
        prompt_tokens=prompt,
        cached_tokens=cached,
        tokens=tokens,
        prompt_tokens_per_second=_per(prompt, seconds),
        tokens_per_second=_per(tokens, seconds),
        hit_rate=cached / prompt if prompt else None,
        preemptions=sum(record.preemptions for record in records),
        resumed=sum(record.resumed for record in records),
        outcomes=dict(Counter(record.outcome or "open" for record in records).most_common()),
        latencies=latencies(records),
    )


def latencies(records: Sequence[Record]) -> dict[str, Latency]:
    well = [record for record in records if record.well]
    gaps = [gap for record in records for gap in zip(record.gaps, record.counts, strict=True)]
    return {
        "lateness": latency(since(records, "due", "sent")),
        "submit": latency(since(records, "sent", "accepted")),
        "queue_wait": latency(since(records, "due", "started")),
        "first_token": latency(since(records, "due", "first")),
        "inter_token": weighted(gaps),
        "end_to_end": latency(since(well, "due", "ended")),
    }


def since(records: Iterable[Record], first: str, second: str) -> list[float]:
    """Seconds between two moments of each record that has both."""
    pairs = [(getattr(record, first), getattr(record, second)) for record in records]
    return [end - start for start, end in pairs if start is not None and end is not None]


def latency(values: Iterable[float]) -> Latency:
    return weighted([(value, 1) for value in values])


def weighted(values: Iterable[tuple[float, int]]) -> Latency:
    """Of values that stand for so many each."""
    ordered = sorted(values)
    totals = list(accumulate(count for _, count in ordered))
    if not totals:
        return Latency(count=0)
    count = totals[-1]
    p50, p90, p99 = (_at(ordered, totals, -(-count * percent // 100)) for percent in PERCENTS)
    mean = sum(value * weight for value, weight in ordered) / count
    return Latency(count=count, mean=mean, p50=p50, p90=p90, p99=p99, longest=ordered[-1][0])


def _at(ordered: Sequence[tuple[float, int]], totals: Sequence[int], place: int) -> float:
    """The value at a place, from 1, in the sequence that the weights spell out."""
    return next(value for (value, _), total in zip(ordered, totals, strict=True) if total >= place)


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def job_rows(records: Iterable[Record], began: float) -> list[dict[str, object]]:
    """Every job for programs; moments in seconds since the start."""
    moments = ("due", "sent", "accepted", "started", "first", "last", "ended")
    return [
        {
            "id": record.id,
            "wanted_prompt_tokens": record.work.prompt_tokens,
            "max_tokens": record.work.max_tokens,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "tokens": record.tokens,
            "outcome": record.outcome,
            "message": record.message,
            **{name: _relative(getattr(record, name), began) for name in moments},
        }
        for record in records
    ]


def _relative(moment: float | None, began: float) -> float | None:
    return None if moment is None else round(moment - began, 6)
