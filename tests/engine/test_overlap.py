"""Planning step n + 1 while the device runs step n: the order of calls, late stops, and equal plans. Real forwards."""

import pytest

from engine import Engine, FinishReason, SamplingParams
from tests.engine.driving import poison, request, run, settle

PROMPT = list(range(10, 27))


class Recorder:
    """Wraps a runner: notes the order of its calls, and fails where it is told to."""

    def __init__(self, engine: Engine) -> None:
        self.calls: list[str] = []
        self.tokens: list[int] = []  # planned, by step
        self.fail_at: str | None = None
        self._runner, self._numbers = engine.runner, {}
        self._launch, self._collect = engine.runner.launch, engine.runner.collect
        engine.runner.launch, engine.runner.collect = self.launch, self.collect

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_at:
            raise RuntimeError(f"{call} failed")

    def launch(self, plan):
        self.tokens.append(plan.tokens)
        self._note(f"launch {len(self.tokens) - 1}")
        handle = self._launch(plan)
        self._numbers[id(plan)] = len(self.tokens) - 1
        return handle

    def collect(self, handle):
        self._note(f"collect {self._numbers[id(handle.plan)]}")
        return self._collect(handle)


def sampling(count: int | None = 6, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, **{"ignore_eos": True} | more)


@pytest.fixture
def overlapped(make_engine) -> Engine:
    engine = make_engine(overlap=True, prefix_cache=True)
    poison(engine)
    return engine


def test_the_next_step_is_launched_before_the_last_is_collected(overlapped):
    recorder = Recorder(overlapped)
    run(overlapped, [request("x", PROMPT, sampling(4))])
    assert recorder.calls == [
        "launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3",
    ]  # fmt: skip


def test_without_overlap_each_step_is_collected_at_once(make_engine):
    engine = make_engine(overlap=False)
    recorder = Recorder(engine)
    run(engine, [request("x", PROMPT, sampling(3))])
    assert recorder.calls == ["launch 0", "collect 0", "launch 1", "collect 1", "launch 2", "collect 2"]


@pytest.mark.parametrize(
    "settings", [{}, {"max_step_tokens": 5}, {"kv_blocks": 9}, {"kv_blocks": 9, "max_sequences": 1}]
)
def test_ends_known_by_count_cost_no_extra_token(make_engine, settings):
    """Prompt + max_tokens - 1 positions each, whether steps overlap or not."""
    jobs = [request(f"r{n}", PROMPT[: 4 + n], sampling(n)) for n in range(1, 9)]
    replies = []
    for overlap in (False, True):
        engine = make_engine(overlap=overlap, **settings)
        recorder = Recorder(engine)
        replies.append({name: reply.tokens for name, reply in run(engine, jobs).items()})
        needed = sum(len(job.tokens) + job.sampling.max_tokens - 1 for job in jobs)
        assert sum(recorder.tokens) - engine.stats().recomputed_tokens == needed
    assert replies[0] == replies[1]


@pytest.mark.parametrize("index", [0, 1, 4, 5])
def test_a_stop_seen_late_drops_the_extra_token_and_leaves_nothing(overlapped, index):
    tokens = run(overlapped, [request("x", PROMPT, sampling())])["x"].tokens
    index = tokens.index(tokens[index])
    before = overlapped.stats().generation_tokens
    stopped = request("x", PROMPT, sampling(stop_token_ids=[tokens[index]]))
    reply = run(overlapped, [stopped, request("beside", PROMPT[:7], sampling(2))])["x"]
    assert reply.tokens == tokens[: index + 1]
    assert reply.usage.completion_tokens == index + 1
    assert overlapped.stats().generation_tokens == before + index + 1 + 2


def test_the_step_after_a_late_stop_is_still_collected(overlapped):
    """`busy` until the device is through, or the blocks of the last request would stay live for ever."""
    tokens = run(overlapped, [request("x", PROMPT, sampling())])["x"].tokens
    overlapped.add(request("x", PROMPT, sampling(stop_token_ids=[tokens[2]])))
    ends = 0
    while overlapped.busy:
        ends += sum(delta.finish_reason is FinishReason.STOP for delta in overlapped.step())
    assert ends == 1
    settle(overlapped)


@pytest.mark.parametrize("steps", range(6))
def test_a_cancel_with_two_steps_in_flight_leaves_nothing(overlapped, steps):
    overlapped.add(request("x", PROMPT, sampling(5)))
    deltas = [delta for _ in range(steps) for delta in overlapped.step()]
    overlapped.launch()
    overlapped.cancel("x")
    while overlapped.busy:
        deltas += overlapped.step()
    assert sum(delta.finish_reason is not None for delta in deltas) == 1
    settle(overlapped)


@pytest.mark.parametrize("call", ["launch 0", "launch 1", "launch 3", "collect 0", "collect 2"])
def test_a_failure_ends_what_is_in_flight_and_nothing_else(overlapped, make_engine, call):
    truth = run(make_engine(), [request("after", PROMPT, sampling())])["after"].tokens
    recorder = Recorder(overlapped)
    recorder.fail_at = call
    replies = run(overlapped, [request(name, PROMPT[n:], sampling()) for n, name in enumerate("xy")])
    assert {reply.finish_reason for reply in replies.values()} == {FinishReason.ERROR}
    assert all(f"{call} failed" in reply.error for reply in replies.values())
    assert str(overlapped.failure) == f"{call} failed"
    assert run(overlapped, [request("after", PROMPT, sampling())])["after"].tokens == truth


def test_a_request_that_waited_is_served_after_the_failure(make_engine):
    engine = make_engine(overlap=True, max_sequences=1)
    truth = run(engine, [request("waits", PROMPT, sampling())])["waits"].tokens
    recorder = Recorder(engine)
    recorder.fail_at = "collect 1"
    replies = run(engine, [request("x", PROMPT[3:], sampling()), request("waits", PROMPT, sampling())])
    assert replies["x"].finish_reason is FinishReason.ERROR
    assert replies["waits"].tokens == truth
