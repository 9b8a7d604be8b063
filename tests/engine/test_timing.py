"""How long steps take: the pieces add up to the busy time, and the kinds of tokens to all that was computed."""

import pytest

from engine.request import STEP_SECONDS, SamplingParams
from engine.timing import StepTimes
from tests.engine.driving import request, run

MS = 1_000_000
PROMPT = list(range(20, 33))


class Clocks:
    """Time that passes, and what of it the device took."""

    def __init__(self) -> None:
        self.now = self.device = 10**15
        self.times = StepTimes(lambda: self.device, lambda: self.now)

    def work(self, host_ms: float, device_ms: float) -> None:
        self.now += round((host_ms + device_ms) * MS)
        self.device += round(device_ms * MS)

    def step(self, host_ms: float, device_ms: float) -> None:
        self.times.begin()
        self.work(host_ms, device_ms)
        self.times.end()


def test_times_of_steps_add_up_and_tell_host_from_device() -> None:
    clocks = Clocks()
    for _ in range(3):
        clocks.step(1, 4)
    assert (clocks.times.total_ns, clocks.times.host_ns) == (15 * MS, 3 * MS)
    assert sum(clocks.times.counts) == clocks.times.counts[STEP_SECONDS.index(0.005)] == 3


def test_time_between_two_steps_belongs_to_the_second_unless_there_was_nothing_to_do() -> None:
    clocks = Clocks()
    clocks.step(1, 1)
    clocks.work(5, 0)  # reports, commands, planning
    clocks.step(1, 1)
    clocks.times.begin()
    clocks.times.idle()
    clocks.work(60_000, 0)
    clocks.step(1, 1)
    assert (clocks.times.total_ns, clocks.times.host_ns) == (11 * MS, 8 * MS)


def test_steps_that_overlap_are_cut_where_each_ends() -> None:
    clocks = Clocks()
    clocks.times.begin()
    clocks.work(1, 0)
    clocks.times.begin()  # the next one is launched while the first runs
    clocks.work(1, 8)
    clocks.times.end()
    clocks.work(0, 10)
    clocks.times.end()
    assert (clocks.times.total_ns, clocks.times.host_ns) == (20 * MS, 2 * MS)
    assert sum(clocks.times.counts) == 2


def test_steps_of_any_length_have_a_place_and_are_never_negative() -> None:
    clocks = Clocks()
    clocks.step(0, 0)
    clocks.step(0, 1000 * STEP_SECONDS[-1] + 1)
    clocks.times.begin()
    clocks.device += 5 * MS  # more than the time that passed: two clocks never agree to the nanosecond
    clocks.times.end()
    assert (clocks.times.counts[0], clocks.times.counts[-1]) == (2, 1)
    assert clocks.times.host_ns == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kv_blocks", [256, 9])
def test_kinds_of_tokens_add_up_to_all_positions_computed(make_engine, overlap, kv_blocks) -> None:
    """With a pool of 9 blocks sequences are preempted; two are resumed from another worker."""
    engine = make_engine(overlap=overlap, kv_blocks=kv_blocks, prefix_cache=True)
    planned, launch = [], engine.runner.launch
    engine.runner.launch = lambda plan: planned.append(plan.tokens) or launch(plan)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    jobs = [request(f"r{n}", [n, *PROMPT[n:]], sampling) for n in range(5)]
    jobs += [request(f"resumed{n}", [n, *PROMPT[n:]], sampling, output=[40, 41, 42]) for n in range(2)]
    run(engine, jobs)
    stats = engine.stats()
    kinds = (stats.prompt_tokens, stats.resumed_tokens, stats.recomputed_tokens, stats.decode_tokens)
    assert sum(kinds) == sum(planned)
    assert bool(stats.recomputed_tokens) == (kv_blocks == 9)
    assert stats.decode_tokens == stats.generation_tokens - len(jobs), "the last token of a reply is never fed"


def test_an_engine_times_each_step_once(make_engine) -> None:
    engine = make_engine()
    run(engine, [request(f"r{n}", PROMPT, SamplingParams(max_tokens=5, ignore_eos=True)) for n in range(3)])
    stats = engine.stats()
    assert sum(stats.step_counts) == stats.steps > 0
    assert 0 < stats.step_host_ns < stats.step_ns


@pytest.mark.parametrize("held", [False, True], ids=["nothing to do", "all held"])
def test_an_engine_without_steps_is_not_busy(make_engine, held) -> None:
    engine = make_engine()
    now = [0]
    engine._times = StepTimes(lambda: 0, lambda: now[0])
    run(engine, [request("x", PROMPT, SamplingParams(max_tokens=2))])
    if held:
        engine.add(request("held", PROMPT))
        engine.hold("held")
        assert engine.step() == []
    now[0] = 60_000 * MS
    engine.unhold("held")
    run(engine, [request("y", PROMPT, SamplingParams(max_tokens=2))])
    assert (engine.stats().step_ns, sum(engine.stats().step_counts)) == (0, engine.stats().steps)


def test_an_engine_knows_its_processor_and_what_it_holds(make_engine) -> None:
    info = make_engine(kv_blocks=7).info
    assert info.device_name
    assert info.weight_bytes > 0
    layers, kv_heads, head_dim, floats = 2, 2, 8, 4
    assert info.kv_bytes == layers * 2 * (7 + 1) * kv_heads * info.block_size * head_dim * floats
