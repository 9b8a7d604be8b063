"""The parts of a load that need no server: arrivals, traces, prompts, records, figures."""

import gzip
import math
import statistics
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from gllm.protocol import Done, Error, Resume, Start, Timings, Tokens, Usage, encode_event
from worker.load.arrivals import bursts, constant, poisson
from worker.load.figures import figures, latency, weighted
from worker.load.plot import open_jobs, plot
from worker.load.record import Record
from worker.load.traces import Request, read_trace
from worker.load.work import Drawn, Prefix, Span, Traced, Vocabulary, Work, timed

MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


# --- arrivals ---


def test_poisson_arrivals_have_the_mean_and_the_spread_of_independent_ones() -> None:
    times = list(islice(poisson(20.0, Random(1)), 20_001))
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.05)
    counts = Counter(map(int, times))
    variance = statistics.variance(counts[second] for second in range(900))
    assert variance == pytest.approx(20, rel=0.15), "that of a Poisson count is its mean"


def test_constant_arrivals_do_not_drift() -> None:
    assert list(islice(constant(8.0, Random(1)), 4)) == [0.0, 0.125, 0.25, 0.375]
    assert next(islice(constant(3.0, Random(1)), 300_000, None)) == 100_000.0


def test_bursts_keep_the_rate() -> None:
    times = list(islice(bursts(8)(20.0, Random(1)), 16_000))
    moments = sorted(set(times))
    assert all(len(set(times[at : at + 8])) == 1 for at in range(0, 800, 8))
    assert len(moments) == 2000
    assert len(times) / times[-1] == pytest.approx(20, rel=0.06)


def test_arrivals_are_a_function_of_the_seed() -> None:
    def first(seed: int) -> list[float | None]:
        shape = Drawn(Span(4, 9), Span(1, 5), Prefix(), seed)
        return [work.at for work in islice(timed(shape.work(), poisson, 5.0, seed), 20)]

    assert first(3) == first(3)
    assert first(3) != first(4)


# --- prompts ---


def drawn(prefix: Prefix, seed: int = 0, count: int = 200) -> list[Work]:
    return list(islice(Drawn(Span(32, 48), Span(0, 5), prefix, seed).work(), count))


def test_lengths_are_drawn_from_their_spans() -> None:
    works = drawn(Prefix())
    assert {work.prompt_tokens for work in works} == set(range(32, 49))
    assert {work.max_tokens for work in works} == set(range(6))
    assert [work.index for work in works] == list(range(200))


def test_groups_share_their_prefix_and_nothing_else() -> None:
    ids = Vocabulary(1000, 16_000)
    prompts = [ids.ids(work, 0) for work in drawn(Prefix(16, 3))]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 3
    assert len({tuple(prompt[16:32]) for prompt in prompts}) == 200
    assert all(1000 <= token < 16_000 for prompt in prompts for token in prompt)
    assert ids.ids(drawn(Prefix(16, 3))[0], 1) != prompts[0], "another seed, other tokens"


def test_trace_blocks_become_the_same_tokens_where_they_are_equal() -> None:
    requests = [Request(0.0, 1200, 10, (7, 8, 9)), Request(1.0, 1600, 20, (7, 8, 10, 11))]
    shape = Traced(requests, scale=0.125, speed=4.0)
    first, second = shape.work()
    assert (first.prompt_tokens, second.prompt_tokens) == (150, 200)
    assert (first.at, second.at, second.max_tokens, shape.longest) == (0.0, 0.25, 2, 202)
    one, other = (Vocabulary(10, 20).ids(work, 0) for work in (first, second))
    assert one[:128] == other[:128]
    assert one[128:] != other[128:150]


def test_trace_without_blocks_has_prompts_of_their_own() -> None:
    first, second = Traced([Request(0.0, 64, 1), Request(0.0, 64, 1)]).work()
    assert Vocabulary(10, 500).ids(first, 0) != Vocabulary(10, 500).ids(second, 0)


# --- traces ---


def trace(folder: Path, text: str | bytes, name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_mooncake_traces_are_read(tmp_path: Path) -> None:
    text = MOONCAKE % (2500, 600, 7, "[1, 2]") + "\n" + MOONCAKE % (1000, 512, 0, "[1]")
    expected = [Request(0.0, 512, 0, (1,)), Request(1.5, 600, 7, (1, 2))]
    assert read_trace(trace(tmp_path, text)) == expected
    assert read_trace(trace(tmp_path, gzip.compress(text.encode()), "t.gz")) == expected
    without = '{"timestamp": 0, "input_length": 5, "output_length": 1, "more": []}'
    assert read_trace(trace(tmp_path, without)) == [Request(0.0, 5, 1)]


def test_azure_traces_are_read(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:04.5319600,3180,8\r\n2023-11-16 18:17:03.2819600,4808,0\r\n"
    text = "\ufeff" + AZURE.strip() + "\r\n" + rows
    assert read_trace(trace(tmp_path, text)) == [Request(0.0, 4808, 0), Request(pytest.approx(1.25), 3180, 8)]
    aware = "GeneratedTokens,TIMESTAMP,ContextTokens\n8,2024-05-10 00:00:00.009930+00:00,31\n"
    assert read_trace(trace(tmp_path, aware)) == [Request(0.0, 31, 8)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the trace is empty"),
        (AZURE, "the trace has no request"),
        ("a,b\n1,2\n", "line 1: neither a column TIMESTAMP nor a JSON object: 'a,b'"),
        (AZURE + "2023-11-16 18:17:03,5,5\nyesterday,5,5\n", "line 3: .*'yesterday,5,5'"),
        (AZURE + "2023-11-16 18:17:03,0,5\n", "line 2: a length is out of range: '2023-11-16 18:17:03,0,5'"),
        (AZURE + "2023-11-16 18:17:03,5\n", "line 2: .*'2023-11-16 18:17:03,5'"),
        (AZURE + "2023-11-16 18:17:03,5,1e3\n", "line 2: .*1e3"),
        ('{"timestamp": 1}\n', "line 1: .*input_length"),
        (MOONCAKE % (0, 600, 1, "[1]"), 'line 1: 2 hash_ids expected for 600 tokens: \'{"timestamp"'),
        (MOONCAKE % (0, 5, 1, "[1]") + MOONCAKE % (0, -5, 1, "[1]"), "line 2: .*input_length"),
        (MOONCAKE % (0, 5, 1, "[1]") + '{"timestamp": 0, "inp', 'line 2: .*truncated.*\'{"timestamp": 0, "inp\''),
        (b"\x1f\x8b\x08broken", "neither text nor gzipped text"),
        (b"\xff\xfe\x00", "neither text nor gzipped text"),
    ],
)
def test_odd_traces_are_refused_by_file_line_and_value(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = trace(tmp_path, text)
    with pytest.raises(ValueError, match=said) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < len(str(path)) + 250


# --- records and figures ---


class Script:
    """Feeds a record with what a worker might write."""

    def __init__(self, index: int, due: float, sent: float) -> None:
        self.record = Record(f"r-{index}", Work(index, due, (("x", 4),), 9), due)
        self.record.sent, self.record.accepted = sent, sent + 0.001
        self.n = 0

    def take(self, entry: str, event: object, now: float) -> None:
        self.record.take(entry.encode(), {b"d": encode_event(event)}, now)  # type: ignore[arg-type]

    def start(self, now: float, cached: int = 0) -> None:
        event = Start(worker="w", attempt=1, numerics="n", prompt_tokens=4, cached_tokens=cached)
        self.take("0-1", event, now)

    def tokens(self, count: int, now: float) -> None:
        event = Tokens(first=self.n, at=self.n, ids=[5] * count, text="x" * count)
        self.n += count
        self.take(f"{self.n}-0", event, now)

    def done(self, now: float) -> Record:
        usage = Usage(prompt_tokens=4, completion_tokens=self.n, preemptions=1)
        event = Done(finish_reason="length", stop=None, text="", usage=usage, timings=Timings())
        self.take("9007199254740991-0", event, now)
        return self.record


def test_record_notes_when_what_was_read() -> None:
    script = Script(0, 10.0, 10.5)
    script.start(11.0, cached=3)
    script.tokens(3, 12.0)
    script.take("3-2", Resume(worker="v", attempt=2, numerics="n", first=3, exact=True), 12.5)
    script.tokens(2, 13.0)
    record = script.done(14.0)
    assert (record.started, record.first, record.last, record.ended) == (11.0, 12.0, 13.0, 14.0)
    assert (record.tokens, record.prompt_tokens, record.cached_tokens, record.resumed) == (5, 4, 3, 1)
    assert list(zip(record.gaps, record.counts, strict=True)) == [(0.0, 2), (0.5, 2)]
    assert (record.outcome, record.well, record.preemptions) == ("length", True, 1)


def test_record_ends_once_and_with_the_kind_of_its_error() -> None:
    failed = Script(0, 0.0, 0.0)
    failed.take("9007199254740991-0", Error(code="internal", message="broken"), 1.0)
    failed.record.end("timeout", 2.0)
    assert (failed.record.outcome, failed.record.message, failed.record.ended) == ("error internal", "broken", 1.0)
    torn = Script(1, 0.0, 0.0)
    torn.tokens(2, 1.0)
    torn.n = 5
    torn.tokens(1, 2.0)
    assert (torn.record.outcome, torn.record.well, torn.record.tokens) == ("Hole", False, 2)
    strange = Script(2, 0.0, 0.0)
    strange.record.take(b"1-0", {b"x": b""}, 3.0)
    assert strange.record.outcome == "ReplyError"


def test_percentiles_are_the_smallest_value_that_so_many_do_not_exceed() -> None:
    generator = Random(5)
    for count in (1, 2, 9, 10, 11, 99, 100, 101, 250):
        values = [(generator.random(), generator.randint(1, 4)) for _ in range(count)]
        plain = [value for value, times in values for _ in range(times)]
        found = weighted(values)
        for percent, got in ((50, found.p50), (90, found.p90), (99, found.p99)):
            enough = [v for v in plain if 100 * sum(w <= v for w in plain) >= percent * len(plain)]
            assert got == min(enough)
        assert (found.count, found.longest) == (len(plain), max(plain))
        assert found.mean == pytest.approx(sum(plain) / len(plain))
    assert latency([]).p50 is None


def some_records() -> list[Record]:
    records: list[Record] = []
    for index in range(10):
        script = Script(index, due=100.0 + index, sent=100.0 + index + 0.01 * index)
        script.start(101.0 + index, cached=1)
        script.tokens(1, 102.0 + index)
        script.tokens(4, 104.0 + index)
        records.append(script.done(105.0 + index))
    failed, waiting = Script(10, 110.0, 110.0).record, Script(11, 111.0, 111.0).record
    failed.end("error internal", 120.0, "broken")
    return [*records, failed, waiting]


def test_figures_are_those_of_the_records() -> None:
    found = figures(some_records(), 100.0, 130.0)
    assert (found.seconds, found.jobs, found.well, found.jobs_per_second) == (20.0, 12, 10, 0.5)
    assert (found.tokens, found.tokens_per_second, found.prompt_tokens_per_second) == (50, 2.5, 2.0)
    assert (found.hit_rate, found.preemptions) == (0.25, 10)
    assert found.outcomes == {"length": 10, "error internal": 1, "open": 1}
    waits = {name: (one.count, one.p50 and round(one.p50, 6)) for name, one in found.latencies.items()}
    assert waits == {
        "lateness": (12, 0.03), "submit": (12, 0.001), "queue_wait": (10, 1.0), "first_token": (10, 2.0),
        "inter_token": (40, 0.5), "end_to_end": (10, 5.0),
    }  # fmt: skip


def test_figures_of_nothing_are_no_error() -> None:
    found = figures([], 1.0, 1.0)
    assert (found.seconds, found.tokens_per_second, found.hit_rate, found.outcomes) == (0.0, 0.0, None, {})


def test_plot_is_a_png_also_of_nothing(tmp_path: Path) -> None:
    for name, records in (("some", some_records()), ("none", [])):
        found = figures(records, 100.0, 100.0)
        plot(tmp_path / name, "50 $ of tokens_per_second", records, found, 100.0)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n")
    times, counts = open_jobs(some_records(), 100.0)
    assert (max(counts), counts[-1], math.isclose(times[-1], 20.0)) == (5, 1, True)
