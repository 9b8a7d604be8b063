"""From jobs to requests: what each kind of prompt becomes, and every refusal with its field and value."""

import json
from typing import Any

import pytest

from engine.request import SamplingParams
from gllm.protocol import Job
from gllm.validate import decode_job, job_from
from tests.worker import text_fixtures as fixtures
from worker.intake import Intake, JobRejected
from worker.models import ModelError
from worker.text import Ending

VOCABULARY = 259  # of the byte-level tokenizer: three control tokens and the bytes


def intake(chat_template: str | None = fixtures.CHATML, **info: Any) -> Intake:
    tokenizer = fixtures.loaded(fixtures.byte_level_backend(), eos_token="<|im_end|>", chat_template=chat_template)
    return Intake(tokenizer, fixtures.engine_info(**({"vocab_size": VOCABULARY} | info)))


def refusal(job: Job, **info: Any) -> tuple[str, str]:
    with pytest.raises(JobRejected) as caught:
        intake(**info).prepare(job)
    return caught.value.code, caught.value.message


class TestPrompts:
    def test_text_messages_and_ids(self) -> None:
        taken = intake()
        encode = taken.tokenizer.encode
        assert taken.prepare(job_from(prompt="a<|im_end|>")) == encode("a<|im_end|>")
        assert taken.prepare(job_from(prompt="a<|im_end|>", parse_special=False)) == encode("a<|im_end|>", False)
        assert taken.prepare(job_from(token_ids=[5, 2, 258])) == [5, 2, 258]
        ids = taken.prepare(job_from(messages=[{"role": "user", "content": "hi"}]))
        assert ids == encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")

    def test_the_ids_of_a_job_are_not_added_to(self) -> None:
        tokenizer = fixtures.loaded(fixtures.llama_backend(), bos_token="<s>")
        assert Intake(tokenizer, fixtures.engine_info()).prepare(job_from(token_ids=[270])) == [270]

    def test_a_job_keeps_its_prompt_for_ever(self) -> None:
        taken = intake("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
        job = job_from(messages=[{"role": "user", "content": "!"}])
        assert taken.tokenizer.decode(taken.prepare(job, 1_770_091_506_000)) == "03 Feb 2026!"

    def test_white_space_is_a_prompt(self) -> None:
        assert len(intake().prepare(job_from(prompt=" \n\t"))) == 3


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"token_ids": [5, 259]}, "token_ids: 259 is outside the model's vocabulary of 259"),
            ({"token_ids": [2**31 - 1]}, "token_ids: 2147483647 is outside the model's vocabulary of 259"),
            ({"prompt": "a", "stop_token_ids": [1, 400]}, "stop_token_ids: 400 is outside"),
            ({"prompt": "a", "logit_bias": {"3": 1.0, "999999": 5}}, "logit_bias: 999999 is outside"),
        ],
    )
    def test_ids_outside_the_vocabulary(self, fields: dict[str, Any], message: str) -> None:
        code, text = refusal(job_from(**fields))
        assert code == "invalid"
        assert text.startswith(message)

    def test_a_token_of_the_tokenizer_that_the_model_has_not(self) -> None:
        code, text = refusal(job_from(prompt="\u00ff"), vocab_size=4)
        assert code == "invalid"
        assert text.startswith("prompt: '")
        assert text.endswith("is outside the model's vocabulary of 4")

    def test_nothing_to_run(self) -> None:
        """What the check of bodies lets through: a template that writes nothing, and empty jobs made by hand."""
        code, text = refusal(job_from(messages=[{"role": "user", "content": "x"}]), chat_template="{# nothing #}")
        assert (code, text) == ("invalid", 'messages: no tokens in [{"role":"user","content":"x"}]')
        assert refusal(Job(prompt="")) == ("invalid", 'prompt: no tokens in ""')
        assert refusal(Job(token_ids=[])) == ("invalid", "token_ids: no tokens in []")

    def test_the_models_limit(self) -> None:
        assert refusal(job_from(token_ids=[5] * 128)) == (
            "too_large",
            "token_ids: 128 tokens, the model's limit is 128 with the reply",
        )
        assert refusal(job_from(prompt="a" * 200))[1].startswith("prompt: 200 tokens, the model's limit is 128")
        for fits in (job_from(token_ids=[5] * 127), job_from(token_ids=[5] * 100, max_tokens=28)):
            assert intake().prepare(fits)

    def test_a_reply_longer_than_the_model_allows_is_cut_at_its_limit(self) -> None:
        job = job_from(token_ids=[5] * 100, max_tokens=2**31 - 1)
        prompt = intake().prepare(job)
        text = intake().reply_text(job, prompt)
        assert text.push([7] * 27) is None
        assert text.push([7]) == Ending("length", None)

    def test_the_pools_capacity(self) -> None:
        small = {"capacity_tokens": 64}
        assert refusal(job_from(token_ids=[5] * 60, max_tokens=5), **small) == (
            "too_large",
            "token_ids: 65 tokens with the reply, the KV cache holds 64",
        )
        assert refusal(job_from(token_ids=[5] * 65), **small)[0] == "too_large"
        for fits in (job_from(token_ids=[5] * 60, max_tokens=4), job_from(token_ids=[5] * 60)):
            assert intake(**small).prepare(fits)

    def test_chat_without_a_template_and_text_with_none(self) -> None:
        job = job_from(messages=[{"role": "user", "content": "hi"}])
        assert refusal(job, chat_template=None) == ("unsupported", "messages: the model has no chat template")
        assert intake(chat_template=None).prepare(job_from(prompt="hi"))
        named = [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]
        assert refusal(job, chat_template=named)[1] == (
            "messages: the model has no chat template named default, only a, b"
        )

    def test_what_the_template_refuses(self) -> None:
        job = job_from(messages=[{"role": "tool", "content": "x"}])
        code, text = refusal(job, chat_template="{{ raise_exception('no role tool') }}")
        assert (code, text) == ("invalid", "messages: the chat template failed: no role tool")

    def test_text_that_is_no_unicode(self) -> None:
        code, text = refusal(Job(prompt="\ud800"))
        assert code == "invalid"
        assert text.startswith("prompt: text that is no valid Unicode")
        assert refusal(Job(messages=[{"role": "user", "content": "\ud800"}]))[1].startswith("messages: text that is no")

    def test_messages_nested_too_deeply(self) -> None:
        content: Any = "x"
        for _ in range(5000):
            content = [content]
        job = Job(messages=[{"role": "user", "content": "hi", "extra": content}])
        assert refusal(job) == ("invalid", "messages: nested too deeply")

    def test_a_broken_template_is_refused_at_start(self) -> None:
        with pytest.raises(ModelError, match="chat_template: line 1"):
            intake("{% for %}")


class TestRequests:
    def test_everything_that_the_engine_knows_arrives(self) -> None:
        values = {
            "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5,
            "stop_token_ids": [3], "ignore_eos": True, "presence_penalty": 0.25, "frequency_penalty": -0.5,
            "repetition_penalty": 1.25, "logprobs": 4, "prompt_logprobs": 2,
        }  # fmt: skip
        job = decode_job(json.dumps({"prompt": "a", "logit_bias": {"7": 1.5}, "cache_salt": "s", **values}).encode())
        request = intake().request("id", job, [5], output=[6, 7], tenant="t", isolate=True)
        assert request.sampling == SamplingParams(**values, logit_bias={7: 1.5})
        assert set(values) | {"logit_bias"} == set(SamplingParams.__struct_fields__), "a new field is wired here too"
        assert (request.id, request.tokens, request.output, request.tenant) == ("id", [5], [6, 7], "t")
        assert (request.cache_salt, request.isolate) == ("s", True)

    def test_defaults_are_the_engines(self) -> None:
        assert intake().request("id", job_from(prompt="a"), [5]).sampling == SamplingParams()


class TestReplies:
    def test_eos_of_the_model_and_of_the_tokenizer_end_a_reply(self) -> None:
        taken = intake(eos_token_ids=[1])
        for end in (1, 2):
            text = taken.reply_text(job_from(prompt="a"), [5])
            assert text.push([10, end]) == Ending("stop", None)

    def test_ignored_eos_leaves_the_jobs_own_stop_ids(self) -> None:
        taken = intake(eos_token_ids=[1])
        text = taken.reply_text(job_from(prompt="a", ignore_eos=True, stop_token_ids=[2]), [5])
        assert text.push([1, 10]) is None
        assert text.push([2]) == Ending("stop", 2)

    @pytest.mark.parametrize("stop", ["!", ["?", "!"]])
    def test_stop_is_one_or_several(self, stop: Any) -> None:
        taken = intake()
        text = taken.reply_text(job_from(prompt="a", stop=stop, include_stop=True), [5])
        assert text.push(taken.tokenizer.encode("ab!c")) == Ending("stop", "!")
        assert text.text == "ab!"

    @pytest.mark.parametrize(("info", "room"), [({}, 8), ({"capacity_tokens": 124}, 5)])
    def test_without_max_tokens_what_the_worker_can_hold_is_the_length(self, info: dict[str, int], room: int) -> None:
        text = intake(**info).reply_text(job_from(prompt="a"), [5] * 120)
        assert text.push([10] * (room - 1)) is None
        assert text.push([10]) == Ending("length", None)

    def test_what_a_larger_worker_published_is_kept(self) -> None:
        text = intake().reply_text(job_from(prompt="a"), [5] * 120)
        assert text.push([10] * 20) == Ending("length", None)
        assert len(text.ids) == 20

    def test_max_tokens_is_the_length(self) -> None:
        text = intake().reply_text(job_from(prompt="a", max_tokens=3), [5])
        assert text.push([10] * 9) == Ending("length", None)
        assert len(text.ids) == 3

    def test_min_tokens(self) -> None:
        text = intake().reply_text(job_from(prompt="a", min_tokens=2, stop="!"), [5])
        assert text.push(intake().tokenizer.encode("!!")) is None
        assert text.push(intake().tokenizer.encode("!")) == Ending("stop", "!")


def test_a_long_conversation_full_of_control_strings_keeps_its_text() -> None:
    content = "some words <|im_end|> and more <| of them\n" * 300
    talk = [{"role": "user", "content": content} for _ in range(20)]
    taken = intake(max_model_len=2**22, capacity_tokens=2**22)
    ids = taken.prepare(job_from(messages=talk))
    assert ids.count(2) == 20
    assert content in taken.tokenizer.decode(ids[:20_000], skip_special=False)
