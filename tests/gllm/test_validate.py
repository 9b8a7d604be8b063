"""The check of a job's body: each refusal names the field and the value."""

import json
import math

import msgspec
import pytest

from gllm.protocol import InvalidJob, Job, Message, encode_job
from gllm.validate import decode_job, encoded, job_from, shown

GOOD = [
    {"prompt": "x"},
    {"prompt": " "},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": "7", "more": {"deep": [1]}}]},
    {"token_ids": [0, 2**31 - 1]},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "max_tokens": None},
    {"prompt": "x", "max_tokens": 5, "min_tokens": 5},
    {"prompt": "x", "temperature": 0},
    {"prompt": "x", "temperature": 1e-30},
    {"prompt": "x", "top_p": 1e-9},
    {"prompt": "x", "top_k": -1},
    {"prompt": "x", "seed": 2**64 - 1},
    {"prompt": "x", "stop": "a"},
    {"prompt": "x", "stop": ["a"] * 16},
    {"prompt": "x", "stop": []},
    {"prompt": "x", "stop": "é" * 256},
    {"prompt": "x", "logit_bias": {"0": -100, "7": 3.4e38}},
    {"prompt": "x", "metadata": {"a": [1, {"b": None}]}},
    {"prompt": "x", "logprobs": 0},
]
BAD = [
    ({}, "prompt, messages, token_ids: exactly one expected, got none"),
    ({"prompt": "x", "messages": []}, "exactly one expected, got prompt and messages"),
    ({"prompt": "x", "token_ids": [1], "messages": []}, "got prompt and messages and token_ids"),
    ({"prompt": ""}, 'prompt: must not be empty, got ""'),
    ({"messages": []}, "messages: must not be empty, got []"),
    ({"token_ids": []}, "token_ids: must not be empty, got []"),
    ({"prompt": 5}, "prompt: expected `str | null`, got `int` (got 5)"),
    ({"prompt": ["x"]}, 'prompt: expected `str | null`, got `array` (got ["x"])'),
    ({"messages": "x"}, 'messages: expected `array | null`, got `str` (got "x")'),
    ({"messages": ["x"]}, 'messages[0]: expected `object`, got `str` (got "x")'),
    ({"messages": [{"content": "x"}]}, "messages[0].role: a string expected, got nothing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: a string expected, got null"),
    ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content: a string expected, got [1]"),
    ({"messages": [{"role": "u", "content": "x"}] * 1025}, "messages: expected `array` of length <= 1024"),
    ({"token_ids": [1, -1]}, "token_ids[1]: expected `int` >= 0 (got -1)"),
    ({"token_ids": [2**31]}, "token_ids[0]: expected `int` <= 2147483647 (got 2147483648)"),
    ({"token_ids": [1.5]}, "token_ids[0]: expected `int`, got `float` (got 1.5)"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens: expected `int` >= 0 (got -1)"),
    ({"prompt": "x", "max_tokens": 2**31}, "max_tokens: expected `int` <= 2147483647 (got 2147483648)"),
    ({"prompt": "x", "max_tokens": "5"}, 'max_tokens: expected `int | null`, got `str` (got "5")'),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens: expected `int | null`, got `float` (got 1.5)"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens: expected `int | null`, got `bool` (got true)"),
    ({"prompt": "x", "max_tokens": 3, "min_tokens": 4}, "min_tokens: at most max_tokens (3) expected, got 4"),
    ({"prompt": "x", "top_p": 0}, "top_p: expected `float` > 0.0 (got 0)"),
    ({"prompt": "x", "top_p": 0.0}, "top_p: expected `float` > 0.0 (got 0.0)"),
    ({"prompt": "x", "top_p": 1.1}, "top_p: expected `float` <= 1.0 (got 1.1)"),
    ({"prompt": "x", "top_p": "0.9"}, 'top_p: expected `float`, got `str` (got "0.9")'),
    ({"prompt": "x", "top_p": None}, "top_p: expected `float`, got `null` (got null)"),
    ({"prompt": "x", "temperature": -0.1}, "temperature: expected `float` >= 0.0 (got -0.1)"),
    ({"prompt": "x", "temperature": 10**400}, "temperature: number out of range (got 1000"),
    ({"prompt": "x", "top_k": -2}, "top_k: expected `int` >= -1 (got -2)"),
    ({"prompt": "x", "min_p": 2}, "min_p: expected `float` <= 1.0 (got 2)"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty: expected `float` > 0.0 (got 0)"),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty: expected `float` <= 2.0 (got 3)"),
    ({"prompt": "x", "seed": -1}, "seed: expected `int` >= 0 (got -1)"),
    ({"prompt": "x", "seed": 2**64}, "seed: at most 18446744073709551615 expected, got 18446744073709551616"),
    ({"prompt": "x", "stop": ["a", ""]}, 'stop[1]: expected `str` of length >= 1 (got "")'),
    ({"prompt": "x", "stop": None}, "stop: expected `str | array`, got `null` (got null)"),
    ({"prompt": "x", "stop": ["a"] * 17}, 'stop: expected `array` of length <= 16 (got ["a"'),
    ({"prompt": "x", "stop": "a" * 257}, 'stop: expected `str` of length <= 256 (got "aaa'),
    ({"prompt": "x", "stop_token_ids": [1] * 65}, "stop_token_ids: expected `array` of length <= 64 (got [1,1"),
    ({"prompt": "x", "logprobs": 21}, "logprobs: expected `int` <= 20 (got 21)"),
    ({"prompt": "x", "cache_salt": ""}, 'cache_salt: expected `str` of length >= 1 (got "")'),
    ({"prompt": "x", "ignore_eos": 1}, "ignore_eos: expected `bool`, got `int` (got 1)"),
    ({"prompt": "x", "metadata": [1]}, "metadata: expected `object | null`, got `array` (got [1])"),
    ({"prompt": "x", "metadata": {"a": "b" * 4096}}, "metadata: at most 4096 bytes expected, got 4104"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias: expected `object`, got `array` (got [1])"),
    ({"prompt": "x", "logit_bias": {"-1": 5}}, 'logit_bias: a token id from 0 to 2147483647 expected as key, got "-1"'),
    ({"prompt": "x", "logit_bias": {"abc": 1}}, 'expected as key, got "abc"'),
    ({"prompt": "x", "logit_bias": {"٣": 1}}, 'expected as key, got "٣"'),
    ({"prompt": "x", "logit_bias": {"05": 1}}, 'expected as key, got "05"'),
    ({"prompt": "x", "logit_bias": {"2147483648": 1}}, 'expected as key, got "2147483648"'),
    ({"prompt": "x", "logit_bias": {"3": 1e39}}, "logit_bias[3]: a finite 32-bit float expected, got 1e+39"),
    ({"prompt": "x", "logit_bias": {"3": True}}, "logit_bias[3]: a finite 32-bit float expected, got true"),
    ({"prompt": "x", "logit_bias": {"3": None}}, "logit_bias[3]: a finite 32-bit float expected, got null"),
    (
        {"prompt": "x", "logit_bias": {str(i): 0 for i in range(1025)}},
        "logit_bias: expected `object` of length <= 1024",
    ),
    ({"prompt": "x", "speed": 9}, "speed: unknown field, got 9"),
    ({"prompt": "x", "a`b\n": 9}, "a`b\\n: unknown field, got 9"),
    ({"prompt": "x", "Prompt": "y"}, 'Prompt: unknown field, got "y"'),
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_validate_takes_good_jobs_in_both_encodings(fields: dict) -> None:
    job = decode_job(json.dumps(fields).encode())
    assert decode_job(msgspec.msgpack.encode(fields)) == job
    assert job_from(**fields) == job
    assert decode_job(encoded(job)) == job


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: str(value)[:60])
def test_validate_refuses_by_field_and_value(fields: dict, message: str) -> None:
    for check in (lambda: decode_job(json.dumps(fields).encode()), lambda: job_from(**fields)):
        with pytest.raises(InvalidJob) as caught:
            check()
        assert message in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"],
)
def test_validate_refuses_numbers_that_are_none(name: str, value: float) -> None:
    """Python producers write NaN and Infinity into JSON; MessagePack has them as floats."""
    fields = {"prompt": "x", name: value}
    for check in (
        lambda: decode_job(json.dumps(fields).encode()),
        lambda: decode_job(msgspec.msgpack.encode(fields)),
        lambda: job_from(**fields),
    ):
        with pytest.raises(InvalidJob, match=rf"^{name}: .*got {value}"):
            check()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_validate_refuses_biases_that_are_no_number(value: float) -> None:
    for body in (json.dumps, msgspec.msgpack.encode):
        data = body({"prompt": "x", "logit_bias": {"3": value}})
        with pytest.raises(InvalidJob, match=rf"^logit_bias\[3\]: .*got {value}"):
            decode_job(data.encode() if isinstance(data, str) else data)


def test_validate_refuses_a_number_that_only_overflows() -> None:
    with pytest.raises(InvalidJob, match=r"^temperature: .*got inf"):
        decode_job(b'{"prompt":"x","temperature":1e999}')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"5",
        b"\x00",
        b"\xff\xfe\x00",
        b'{"prompt":"x"} x',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"x","metadata":{"a":NaN}}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"\x81\xa6prompt",
        b"\x81\xa6prompt\xa1\xff",
        b"\x81\xa6prompt\xc1",
        b"\x80extra",
        b"\x81\x90\x01",
        b"\x81\xa6prompt" + b"\x91" * 200_000,
        "{'prompt': 'x'}".encode("utf-16"),
    ],
    ids=lambda body: str(body[:20]),
)
def test_validate_refuses_what_is_no_job_at_all(body: bytes) -> None:
    with pytest.raises(InvalidJob) as caught:
        decode_job(body)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_validate_takes_the_last_of_doubled_json_keys() -> None:
    assert decode_job(b'{"prompt":"a","prompt":"b"}').prompt == "b"


def test_validate_takes_integer_keys_for_biases_from_python() -> None:
    assert job_from(prompt="x", logit_bias={3: 1}) == job_from(prompt="x", logit_bias={"3": 1.0})


def test_validate_takes_messages_and_tuples_from_python() -> None:
    job = job_from(messages=(Message(role="user", content="x"),), stop=("a",))
    assert (job.messages, job.stop) == ([{"role": "user", "content": "x"}], ["a"])


@pytest.mark.parametrize("value", [b"bytes", object(), range(3), {1}])
def test_validate_refuses_python_values_that_json_has_not(value: object) -> None:
    with pytest.raises(InvalidJob):
        job_from(prompt="x", metadata={"a": value}, token_ids=value)
    with pytest.raises(InvalidJob):
        job_from(prompt=value)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_validate_refuses_text_that_cannot_be_encoded(text: str) -> None:
    with pytest.raises(InvalidJob, match="body: "):
        encoded(Job(prompt=text))


def test_validate_refuses_a_body_beyond_the_limit() -> None:
    with pytest.raises(InvalidJob, match="at most 4194304 bytes expected, got "):
        encoded(Job(prompt="x" * 4_194_304))


def test_validate_shows_values_short_and_on_one_line() -> None:
    assert shown("a\nb\x1b[31m") == '"a\\nb\\u001b[31m"'
    assert shown("x" * 100) == '"' + "x" * 63 + "…"
    assert shown(math.nan) == "nan"
    assert shown({"a": object}).startswith('{"a":')
    assert shown("\ud800") == "'\\ud800'"


def test_validate_bodies_leave_out_what_was_not_said() -> None:
    assert encode_job(job_from(prompt="x", max_tokens=3)) == b'{"prompt":"x","max_tokens":3}'
