"""No text is refused for its length that would have fitted; long ones are refused before they are encoded."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from gllm.protocol import Job
from gllm.validate import job_from
from tests.worker import styles
from tests.worker import text_fixtures as fixtures
from worker.intake import Intake, JobRejected
from worker.shortest import bound_of
from worker.tokenizer import Tokenizer, TooManyTokens

BOUNDED = ("gpt2", "llama3", "qwen2", "llama2", "llama2-metaspace", "mistral", "no-prefix", "gemma")


def plain_style(monkeypatch: pytest.MonkeyPatch, name: str) -> Tokenizer:
    """One whose added tokens take no space along."""
    kept = [token for token in styles.ADDED if not (token.lstrip or token.rstrip)]
    monkeypatch.setattr(styles, "ADDED", kept)
    return fixtures.loaded(styles.STYLES[name]())


def texts(rng: random.Random) -> list[str]:
    hangul, greek, marks = "\u1112\u1161\u11ab", "\u03b1\u0313\u0300\u0345", "e\u0301"
    parts = [*styles.LINES, hangul, greek, marks, " ", "\n\n\n", "<|im_start|>", "\x00\x04", "\U000f0000", "quickly"]
    made = ["".join(rng.choices(parts, k=rng.randrange(8))) for _ in range(40)]
    return made + [part * 50 for part in parts]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_has_at_least_as_many_tokens_as_said(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tokenizer, rng = plain_style(monkeypatch, name), random.Random(name)
    for text in texts(rng):
        assert tokenizer.fewest(text) <= len(tokenizer.encode(text, add_special=False))
    assert tokenizer.fewest("漢a " * 10_000) > 100


def test_the_demo_model_drops_bytes_that_it_has_not() -> None:
    tokenizer = fixtures.smollm2()
    assert tokenizer.encode("\x04" * 1000) == []
    assert tokenizer.fewest("\x04" * 1000) == 0
    for text in texts(random.Random(1)):
        assert tokenizer.fewest(text) <= len(tokenizer.encode(text))


def test_composed_characters_count_for_all_that_they_are_made_of() -> None:
    composed, parts = "\u1f82" * 20, "\u03b1\u0313\u0300\u0345" * 20
    vocabulary = [f"<0x{byte:02X}>" for byte in range(256)] + [composed]
    model = models.BPE({content: i for i, content in enumerate(vocabulary)}, [], byte_fallback=True, ignore_merges=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFC()
    tokenizer = fixtures.loaded(backend)
    assert tokenizer.encode(parts) == [256]
    assert (tokenizer.fewest(parts), tokenizer.fewest(parts * 2)) == (1, 2)


@pytest.mark.parametrize("name", ["unigram-first", "wordpiece"])
def test_other_models_have_no_bound(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert plain_style(monkeypatch, name).fewest("a" * 10_000) == 0


def test_what_may_take_characters_away_has_no_bound() -> None:
    def bounded(**parts: object) -> bool:
        backend = fixtures.byte_level_backend()
        for part, value in parts.items():
            setattr(backend, part, value)
        return bound_of(backend) is not None

    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert bounded()
    assert bounded(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("a")]))
    for normalizer in (normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" +"), " ")):
        assert not bounded(normalizer=normalizer)
    assert not bounded(normalizer=normalizers.Replace("ab", "a"))
    for cutter in (pre_tokenizers.Whitespace(), pre_tokenizers.Split(" ", "removed")):
        assert not bounded(pre_tokenizer=pre_tokenizers.Sequence([cutter, cut]))
    assert not bounded(pre_tokenizer=pre_tokenizers.Metaspace())  # not every character has a token then
    backend = fixtures.byte_level_backend()
    backend.add_special_tokens([AddedToken("<end>", rstrip=True)])
    assert bound_of(backend) is None


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"prompt": "a " * 1_000_000}, "prompt: at least 153847 tokens, the model's limit is 128 with the reply"),
        (
            {"messages": [{"role": "user", "content": "a" * 2_000_000}]},
            "messages: at least 153850 tokens, the model's limit is 128 with the reply",
        ),
    ],
)
def test_what_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch, job: dict, message: str) -> None:
    tokenizer = fixtures.loaded(fixtures.byte_level_backend(), chat_template=fixtures.CHATML)
    for name in ("encode", "encode_guarded"):
        monkeypatch.setattr(tokenizer, name, lambda *_: pytest.fail("it was tokenised"))
    intake = Intake(tokenizer, fixtures.engine_info())
    with pytest.raises(JobRejected) as caught:
        intake.prepare(job_from(**job))
    assert (caught.value.code, caught.value.message) == ("too_large", message)
    intake.close()


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_what_does_not_fit_never_becomes_a_list(kind: str) -> None:
    """The same refusal with the whole number of tokens."""
    tokenizer = fixtures.loaded(fixtures.byte_level_backend(), chat_template="{{ messages[0].content }}")
    intake = Intake(tokenizer, fixtures.engine_info(vocab_size=300))
    job = (
        job_from(prompt="a" * 200) if kind == "prompt" else job_from(messages=[{"role": "user", "content": "a" * 200}])
    )
    with pytest.raises(JobRejected) as caught:
        intake.prepare(job)
    assert isinstance(caught.value.__context__, TooManyTokens)
    assert caught.value.message == f"{kind}: 200 tokens, the model's limit is 128 with the reply"
    intake.close()


def test_text_that_is_no_unicode_is_still_what_is_said() -> None:
    with pytest.raises(JobRejected, match="prompt: text that is no valid Unicode"):
        Intake(fixtures.smollm2(), fixtures.engine_info()).prepare(Job(prompt="\ud800"))
