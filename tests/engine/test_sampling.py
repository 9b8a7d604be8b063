"""Sampling through whole engines: parameters, refusals, and replies that neighbours never change."""

import json

import numpy as np
import pytest
import torch

from engine import Engine, FinishReason, SamplingParams
from tests.engine.driving import Reply, request, run
from tests.engine.sampling import fix_logits

VOCAB = 160
FREE = SamplingParams(max_tokens=30, ignore_eos=True)


def sampling(**parameters: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 1} | parameters)


def row(**scores: float) -> list[float]:
    """Logits of 0 but for some tokens: row(t7=2.0)."""
    logits = [0.0] * VOCAB
    for token, score in scores.items():
        logits[int(token[1:])] = score
    return logits


def scripted(make_engine, **scores: float) -> Engine:
    engine = make_engine()
    fix_logits(engine, row(**scores))
    return engine


def reply_to(engine: Engine, prompt: list[int], params: SamplingParams, **more: object) -> Reply:
    return run(engine, [request("x", prompt, params, **more)])["x"]


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 0.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_tiny_temperature_equals_greedy_and_its_neighbour_does_not_notice(make_engine, dtype, temperature):
    neighbour = request("n", [5, 6], sampling(seed=4))
    greedy = reply_to(make_engine(dtype=dtype), [3, 4, 5], sampling(temperature=0.0)).tokens
    alone = run(make_engine(dtype=dtype), [neighbour])["n"].tokens
    replies = run(make_engine(dtype=dtype), [request("x", [3, 4, 5], sampling(temperature=temperature)), neighbour])
    assert replies["x"].tokens == greedy
    assert replies["n"].tokens == alone


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.1, float("nan"), float("inf"), "0.9"])
def test_a_top_p_outside_its_range_is_refused_by_name_and_value(make_engine, value):
    engine = make_engine()
    with pytest.raises(ValueError, match=r"top_p.*from 0.0 to 1.0") as refused:
        engine.add(request("x", [3], sampling(top_p=value)))
    assert repr(value) in str(refused.value)
    assert not engine.busy


def test_the_smallest_top_p_is_greedy_and_the_largest_is_off(make_engine):
    engine = make_engine()
    greedy = reply_to(engine, [3, 4], sampling(temperature=0.0)).tokens
    assert reply_to(engine, [3, 4], sampling(top_p=1e-9)).tokens == greedy
    assert reply_to(engine, [3, 4], sampling(top_p=1e-300)).tokens == greedy
    assert reply_to(engine, [3, 4], sampling(top_p=1.0)).tokens == reply_to(engine, [3, 4], sampling()).tokens


def test_greedy_ties_stay_with_the_lowest_id_beside_drawing_neighbours(make_engine):
    engine = scripted(make_engine, t11=5.0, t12=5.0, t140=5.0)
    greedy = sampling(temperature=0.0)
    assert reply_to(engine, [3], greedy).tokens == [11] * 12
    for attempt in range(10):
        drawing = [request(f"d{i}", [3], sampling(seed=attempt * 10 + i)) for i in range(5)]
        replies = run(engine, [*drawing[:2], request("x", [3], greedy), *drawing[2:]])
        assert replies["x"].tokens == [11] * 12
        assert len({token for name in replies for token in replies[name].tokens}) > 3


def test_repetition_penalty_counts_the_prompt_and_the_output(make_engine):
    """Token 7 (prompt) falls from 4 to 2, below 8 at 3; then 8 has been put out and falls to 1.5, so 7 is next."""
    engine = scripted(make_engine, t7=4.0, t8=3.0)
    penalised = sampling(temperature=0.0, repetition_penalty=2.0, max_tokens=3)
    assert reply_to(engine, [7, 7, 9], penalised).tokens == [8, 7, 7]


def test_repetition_penalty_multiplies_negative_logits(make_engine):
    engine = make_engine()
    fix_logits(engine, [-10.0] * 7 + [-1.0, -1.5] + [-10.0] * 151)
    penalised = sampling(temperature=0.0, repetition_penalty=2.0, max_tokens=2)
    assert reply_to(engine, [7], penalised).tokens == [8, 7]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_penalties_do_not_count_the_prompt(make_engine, penalty):
    engine = scripted(make_engine, t7=4.0, t8=3.5)
    penalised = sampling(temperature=0.0, max_tokens=2, **{penalty: 1.0})
    assert reply_to(engine, [7, 7, 7, 8], penalised).tokens == [7, 8]


def test_frequency_penalty_grows_with_each_occurrence_and_presence_does_not(make_engine):
    engine = scripted(make_engine, t7=4.0, t8=2.5)
    frequent = sampling(temperature=0.0, frequency_penalty=1.0, max_tokens=5)
    assert reply_to(engine, [1], frequent).tokens == [7, 7, 8, 7, 8]
    assert reply_to(engine, [1], sampling(temperature=0.0, presence_penalty=1.0, max_tokens=4)).tokens == [7] * 4


@pytest.mark.parametrize(
    "penalties",
    [{"repetition_penalty": 1.5}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.5, "repetition_penalty": 0.8}],
    ids="+".join,
)
def test_penalties_survive_preemption_and_resume(make_engine, penalties):
    params = sampling(max_tokens=40, **penalties)
    prompt = list(range(3, 23))
    alone = reply_to(make_engine(), prompt, params).tokens
    rival = request("rival", list(range(30, 55)), sampling(max_tokens=40, temperature=0.0))
    replies = run(make_engine(kv_blocks=20), [rival, request("x", prompt, params)])
    assert replies["x"].usage.preemptions > 0
    assert replies["x"].tokens == alone
    for published in (1, 20, 39):
        resumed = reply_to(make_engine(), prompt, params, output=alone[:published])
        assert alone[:published] + resumed.tokens == alone


def test_a_reply_is_the_same_beside_neighbours_without_seeds(make_engine):
    seeded = request("x", [3, 4, 5], sampling(seed=99, max_tokens=20))
    alone = run(make_engine(), [seeded])["x"].tokens
    for attempt in range(5):
        strangers = [request(f"u{attempt}-{i}", [3, 4, 5][: i + 1], FREE) for i in range(3)]
        replies = run(make_engine(seed=attempt), [*strangers[:attempt], seeded, *strangers[attempt:]])
        assert replies["x"].tokens == alone


def test_without_a_seed_the_id_and_the_engines_seed_decide(make_engine):
    def drawn(name: str, engine_seed: int) -> list[int]:
        return run(make_engine(seed=engine_seed), [request(name, [3, 4], FREE)])[name].tokens

    assert drawn("a", 0) == drawn("a", 0)
    replies = [drawn(name, seed) for name in ("a", "b") for seed in (0, 1, 2**64 - 1)]
    assert len({tuple(reply) for reply in replies}) == 6


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_in_range_works_and_repeats(make_engine, seed):
    engine = make_engine(max_sequences=2)
    first = reply_to(engine, [3, 4], sampling(seed=seed)).tokens
    assert reply_to(engine, [3, 4], sampling(seed=seed)).tokens == first
    other = (seed + 1) % 2**64
    assert reply_to(engine, [3, 4], sampling(seed=other)).tokens != first


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "7"])
def test_a_seed_out_of_range_is_refused_by_name(make_engine, seed):
    with pytest.raises(ValueError, match=r"seed: .*whole number"):
        make_engine().add(request("x", [3], sampling(seed=seed)))


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({999_999: 5.0}, "logit_bias: token id 999999"),
        ({VOCAB: 5.0}, "logit_bias: token id 160"),
        ({-1: 5.0}, "logit_bias: token id -1"),
        ({3: float("nan")}, r"logit_bias\[3\].*nan"),
        ({3: float("inf")}, r"logit_bias\[3\].*inf"),
        ({3: 1e39}, r"logit_bias\[3\].*1e\+39"),
    ],
)
def test_a_wrong_bias_is_refused_and_the_engine_goes_on(make_engine, bias, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add(request("wrong", [3], sampling(logit_bias=bias)))
    reply = reply_to(engine, [3], sampling(logit_bias={3: 100.0, 4: -100.0}))
    assert reply.tokens == [3] * 12
    largest = float(np.finfo(np.float32).max)
    assert reply_to(engine, [3], sampling(logit_bias={5: largest, 4: -largest})).tokens == [5] * 12


def test_bias_and_min_tokens_leave_logprobs_alone(make_engine):
    engine = scripted(make_engine, t7=4.0, t8=3.0)
    biased = sampling(logit_bias={9: 50.0}, logprobs=2, max_tokens=1, stop_token_ids=[7], min_tokens=1)
    expected = torch.tensor(row(t7=4.0, t8=3.0)).log_softmax(-1)
    token, logprob, top = reply_to(engine, [3], biased).logprobs[0]
    assert (token, [pair[0] for pair in top]) == (9, [7, 8])
    assert logprob == pytest.approx(float(expected[9]))
    assert [pair[1] for pair in top] == pytest.approx([float(expected[7]), float(expected[8])])


def test_banned_tokens_have_logprobs_that_json_can_write(make_engine):
    engine = make_engine()
    fix_logits(engine, [-np.inf] * 3 + [0.0] + [-np.inf] * 156)
    reply = reply_to(engine, [3, 3], sampling(temperature=0.01, logprobs=5, prompt_logprobs=5, max_tokens=2))
    written = json.loads(json.dumps([reply.logprobs, reply.prompt_logprobs], allow_nan=False))
    assert written[0][0][:2] == [3, 0.0]
    assert [pair[1] for pair in written[0][0][2]] == [0.0] + [-9999.0] * 4
    assert written[1] == [None, [3, 0.0, written[0][0][2]]]


@pytest.mark.parametrize("minimum", [0, 1, 5])
@pytest.mark.parametrize("how", ["eos", "stop id"])
def test_ending_tokens_are_masked_until_min_tokens(make_engine, minimum, how):
    engine = scripted(make_engine, **{"t2" if how == "eos" else "t50": 9.0}, t7=4.0)
    ends = {"ignore_eos": False} if how == "eos" else {"stop_token_ids": [50]}
    reply = reply_to(engine, [3], sampling(temperature=0.0, min_tokens=minimum, max_tokens=8, **ends))
    assert reply.tokens == [7] * minimum + [2 if how == "eos" else 50]
    assert reply.finish_reason is FinishReason.STOP


def test_ignore_eos_silences_eos_but_not_the_jobs_own_stop_ids(make_engine):
    engine = scripted(make_engine, t2=9.0, t7=4.0)
    assert reply_to(engine, [3], sampling(temperature=0.0, max_tokens=4)).tokens == [2] * 4
    stopped = reply_to(engine, [3], sampling(temperature=0.0, stop_token_ids=[2], min_tokens=2))
    assert (stopped.tokens, stopped.finish_reason) == ([7, 7, 2], FinishReason.STOP)


def test_min_tokens_counts_published_tokens_of_a_resumed_reply(make_engine):
    engine = scripted(make_engine, t2=9.0, t7=4.0)
    params = sampling(temperature=0.0, min_tokens=3, ignore_eos=False)
    assert reply_to(engine, [3], params, output=[7, 7]).tokens == [7, 2]
    assert reply_to(engine, [3], params, output=[7, 7, 7]).tokens == [2]


def test_an_end_id_beyond_the_vocabulary_harms_nobody(make_engine):
    engine = make_engine(eos_token_ids=(VOCAB, 10**6))
    replies = run(engine, [request("x", [3], sampling(min_tokens=3, ignore_eos=False)), request("n", [4], sampling())])
    assert {reply.finish_reason for reply in replies.values()} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_infinite_parameters_are_refused_and_huge_ones_work(make_engine):
    engine = make_engine()
    for name in ("temperature", "repetition_penalty"):
        with pytest.raises(ValueError, match=f"{name}: .*inf"):
            engine.add(request("x", [3], sampling(**{name: float("inf")})))
        assert len(reply_to(engine, [3], sampling(**{name: 1e300})).tokens) == 12


def test_a_row_of_nan_ends_alone_with_an_error(make_engine):
    engine = make_engine()
    alone = run(engine, [request("n", [4, 5], sampling())])["n"].tokens
    compute = engine.runner.logits

    def break_first(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        if len(logits) == 2:
            logits[0, 5] = torch.nan
        return logits

    engine.runner.logits = break_first
    replies = run(engine, [request("x", [3, 4, 5, 6], sampling()), request("n", [4, 5], sampling())])
    assert (replies["x"].finish_reason, replies["x"].tokens) == (FinishReason.ERROR, [])
    assert "not finite" in (replies["x"].error or "")
    assert replies["n"].tokens == alone
