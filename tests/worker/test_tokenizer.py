"""Tokenizers as model directories hold them: ids and texts equal to the library's, and what is refused."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, processors

from gllm.validate import job_from
from tests.worker import text_fixtures as fixtures
from worker.control import PromptError
from worker.intake import Intake
from worker.models import ModelError
from worker.tokenizer import load_tokenizer

TEXTS = ("", "a", "Hello  world", " é漢😀\n\t 12345", "<|im_start|>user\nhi<|im_end|>", "\x00\ufffd\u0301")


def test_ids_equal_the_library_and_texts_come_back() -> None:
    for build in (fixtures.byte_level_backend, fixtures.llama_backend):
        backend = build()
        tokenizer = fixtures.loaded(backend)
        for text in TEXTS:
            assert tokenizer.encode(text) == backend.encode(text).ids
            assert tokenizer.encode(text, add_special=False) == backend.encode(text, add_special_tokens=False).ids
    tokenizer = fixtures.loaded(fixtures.byte_level_backend())
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_control_tokens_are_parsed_or_not_as_asked() -> None:
    tokenizer = fixtures.loaded(fixtures.byte_level_backend())
    text = "a<|im_end|>b"
    assert 2 in tokenizer.encode(text)
    plain = tokenizer.encode(text, parse_special=False)
    assert 2 not in plain
    assert tokenizer.decode(plain) == text
    assert tokenizer.encode("no such token", parse_special=False) == tokenizer.encode("no such token")


def test_there_is_exactly_one_beginning_of_sequence() -> None:
    tokenizer = fixtures.loaded(fixtures.llama_backend(), bos_token="<s>")
    for text in ("ab", "<s>ab", "<s><s>ab"):
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert ids.count(1) == 1
    assert 1 not in tokenizer.encode("ab", add_special=False)
    assert tokenizer.encode("<s>ab", parse_special=False).count(1) == 1
    assert tokenizer.encode("ab<s>").count(1) == 2, "only the beginning is ours to judge"


def test_a_text_of_nothing_but_beginnings_costs_its_length() -> None:
    tokenizer = fixtures.loaded(fixtures.llama_backend(), bos_token="<s>")
    began = time.process_time()
    assert tokenizer.encode("<s>" * 600_000) == [1]
    assert time.process_time() - began < 5, "taken off one by one they would cost twice that"


def test_a_tokenizer_that_adds_no_beginning_keeps_those_of_the_text() -> None:
    tokenizer = fixtures.loaded(fixtures.byte_level_backend(), bos_token="<|endoftext|>")
    assert tokenizer.encode("<|endoftext|><|endoftext|>a").count(0) == 2


def test_an_end_of_sequence_that_the_tokenizer_adds_is_kept() -> None:
    backend = fixtures.byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)])
    assert fixtures.loaded(backend).encode("a<|im_end|>")[-2:] == [2, 2]


def test_truncation_and_padding_in_the_file_are_off() -> None:
    backend = fixtures.byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(fixtures.loaded(backend).encode("a" * 20)) == 20


def test_eos_and_named_tokens_come_from_the_config() -> None:
    token = {"content": "<|im_end|>", "lstrip": False, "special": True}
    names = {"eos_token": token, "bos_token": "<|im_start|>", "pad_token": None}
    tokenizer = fixtures.loaded(fixtures.byte_level_backend(), **names)
    assert tokenizer.eos_ids == {2}
    assert tokenizer.named_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_eos_may_stand_in_the_older_file(tmp_path: Path) -> None:
    fixtures.save(tmp_path, fixtures.byte_level_backend())
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert load_tokenizer(tmp_path).eos_ids == {2}


def test_no_config_and_an_eos_that_is_no_token_mean_no_eos(tmp_path: Path) -> None:
    fixtures.byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).eos_ids == frozenset()
    assert fixtures.loaded(fixtures.byte_level_backend(), eos_token="<nowhere>").eos_ids == frozenset()


def test_tokens_that_only_the_config_calls_special_are_hidden_from_the_text() -> None:
    backend = fixtures.byte_level_backend(["<end>", "<tool>"])
    tokenizer = fixtures.loaded(backend, eos_token="<end>", additional_special_tokens=["<tool>", "<nowhere>"])
    ids = tokenizer.encode("a<end>b<tool>")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.vocab_size == backend.get_vocab_size(), "a name alone invents no token"


def test_an_added_token_becomes_special_and_keeps_its_other_switches() -> None:
    backend = fixtures.byte_level_backend()
    backend.add_tokens([AddedToken("<end>", rstrip=True, special=False)])
    assert fixtures.loaded(backend).decode(fixtures.loaded(backend).encode("a<end>  b")) == "a<end>b"
    tokenizer = fixtures.loaded(backend, eos_token="<end>")
    assert tokenizer.decode(tokenizer.encode("a<end>  b")) == "ab"
    assert tokenizer.eos_ids == {259}


def test_the_digest_follows_what_decides_about_ids() -> None:
    backend = fixtures.byte_level_backend()
    plain = fixtures.loaded(backend)
    assert fixtures.loaded(backend).digest == plain.digest
    others = [
        fixtures.loaded(backend, eos_token="<|im_end|>"),
        fixtures.loaded(backend, chat_template="{{ messages }}"),
        fixtures.loaded(fixtures.byte_level_backend(["more"])),
    ]
    assert len({plain.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: missing"),
        ("tokenizer.json", "{", "tokenizer.json: not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: an object was expected, got list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "tokenizer_config.json: chat_template"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", "\x00", "tokenizer_config.json: not JSON"),
        ("tokenizer.json", "[" * 100_000, "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "tokenizer.json: not a tok"),
    ],
)
def test_a_broken_file_of_the_tokenizer_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    file = fixtures.save(tmp_path, fixtures.byte_level_backend()) / name
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
)
def test_a_decoder_that_would_rewrite_what_is_out_is_refused(decoder: decoders.Decoder) -> None:
    backend = fixtures.word_backend()
    backend.decoder = decoder
    with pytest.raises(ModelError, match="cannot be streamed"):
        fixtures.loaded(backend)


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(PromptError, match="no valid Unicode"):
        fixtures.loaded(fixtures.byte_level_backend()).encode("a\ud800b")


class TestTemplatesOfAModel:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return fixtures.save(tmp_path, fixtures.byte_level_backend())

    def test_a_file_of_its_own_wins_over_the_config(self, model: Path) -> None:
        (model / "tokenizer_config.json").write_text('{"chat_template": "config"}')
        assert load_tokenizer(model).chat_template == "config"
        (model / "chat_template.jinja").write_text("file")
        assert load_tokenizer(model).chat_template == "file"

    def test_several_named_ones(self, model: Path) -> None:
        named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        tokenizer = load_tokenizer(model)
        assert tokenizer.chat_templates == {"tool_use": "T", "default": "D"}
        assert tokenizer.chat_template == "D"

    def test_further_ones_in_files_of_their_own(self, model: Path) -> None:
        (model / "chat_template.jinja").write_text("D")
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "rag.jinja").write_text("R")
        assert load_tokenizer(model).chat_templates == {"default": "D", "rag": "R"}

    def test_one_beside_the_config(self, model: Path) -> None:
        (model / "chat_template.json").write_text('{"chat_template": "J"}')
        assert load_tokenizer(model).chat_template == "J"

    def test_each_place_wins_over_those_after_it(self, model: Path) -> None:
        """As in transformers: files of their own replace what the config has, names and all."""
        places = ["tokenizer_config.json", "chat_template.json"]
        for place in reversed(places):
            (model / place).write_text(json.dumps({"chat_template": place}))
            assert load_tokenizer(model).chat_templates == {"default": place}
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "rag.jinja").write_text("R")
        assert load_tokenizer(model).chat_templates == {"rag": "R"}
        (model / "chat_template.jinja").write_text("D")
        assert load_tokenizer(model).chat_templates == {"default": "D", "rag": "R"}

    def test_named_ones_in_a_file_of_their_own_and_in_gguf(self, model: Path) -> None:
        named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
        (model / "chat_template.json").write_text(json.dumps({"chat_template": named}))
        assert load_tokenizer(model).chat_templates == {"default": "D", "tool_use": "T"}
        fields = fixtures.byte_level_fields(chat_template="D")
        path = fixtures.write_gguf(model / "m.gguf", **fields)
        assert load_tokenizer(path).chat_templates == {"default": "D"}

    @pytest.mark.parametrize(
        "value", [5, True, {}, {"name": "x"}, [[]], ["x"], [{"name": 1, "template": "T"}]], ids=str
    )
    @pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.json"])
    def test_what_is_no_template_is_refused_by_its_place(self, model: Path, place: str, value: Any) -> None:
        (model / place).write_text(json.dumps({"chat_template": value}))
        with pytest.raises(ModelError, match=rf"{place}: chat_template: text or named templates expected"):
            load_tokenizer(model)

    @pytest.mark.parametrize("file", ["chat_template.jinja", "additional_chat_templates/x.jinja"])
    def test_a_template_that_is_no_text_is_refused_by_name(self, model: Path, file: str) -> None:
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_bytes(b"\xff\xfe")
        with pytest.raises(ModelError, match=rf"{file}: not a text"):
            load_tokenizer(model)

    def test_none_and_none_that_is_the_default(self, model: Path) -> None:
        assert load_tokenizer(model).chat_template is None
        named = [{"name": "a", "template": "A"}, {"name": "b", "template": "B"}]
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert load_tokenizer(model).chat_template is None


@pytest.mark.parametrize("kind", ["prompt", "messages", "hostile"])
def test_a_long_text_becomes_ids_while_other_threads_run(kind: str) -> None:
    """The event loop's thread must not wait for a tokenising thread: watch how much of the time another one could run.

    Not the longest wait: on a busy machine that may be the machine's. A lock that is kept leaves next to nothing.
    """
    text = ("<|im_end|> <| " if kind == "hostile" else "The quick brown fox, 1234 jumps. ") * 30_000
    prompt = {"prompt": text} if kind == "prompt" else {"messages": [{"role": "user", "content": text}]}
    size = 2**22
    info = fixtures.engine_info(vocab_size=49152, max_model_len=size, capacity_tokens=size)
    intake, job = Intake(fixtures.smollm2(), info), job_from(**prompt)
    waits: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            before = time.perf_counter()
            done.wait(0.001)
            waits.append(time.perf_counter() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    intake.prepare(job)
    took = time.perf_counter() - started
    done.set()
    watcher.join()
    assert sum(wait for wait in waits if wait < 0.05) > took / 10, "something kept the global lock"


def test_the_worker_side_of_text_imports_no_torch() -> None:
    code = "import sys, worker.intake, worker.models; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
