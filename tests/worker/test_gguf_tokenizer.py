"""Tokenizers inside GGUF files: the real one of the demo model, and small ones of each kind."""

import json
import random
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.worker import text_fixtures as fixtures
from tests.worker.text_fixtures import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from worker.models import ModelError
from worker.tokenizer import Tokenizer, load_tokenizer

ALPHABET = "abAB  \n\t0129٣²½'sé漢😀!.,-_<|>\u0301\u00a0"


def load(path: Path, model: str = "gpt2", **fields: Any) -> Tokenizer:
    return load_tokenizer(fixtures.write_gguf(path / "model.gguf", model, **fields))


class TestDemoModel:
    def test_known_ids(self) -> None:
        tokenizer = fixtures.smollm2()
        assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
        assert tokenizer.encode("<|im_start|>") == [1]
        assert (tokenizer.eos_ids, tokenizer.vocab_size) == ({2}, 49152)
        assert tokenizer.named_tokens["bos_token"] == "<|im_start|>"

    def test_digits_stand_alone(self) -> None:
        tokenizer = fixtures.smollm2()
        assert [tokenizer.decode([token]) for token in tokenizer.encode("x 1234")] == ["x", " ", "1", "2", "3", "4"]

    def test_ids_equal_the_definition(self) -> None:
        """Against byte-level BPE written down in Python, on texts that cross every border between kinds of words."""
        tokenizer, rng = fixtures.smollm2(), random.Random(3)
        ranks = merge_ranks(tokenizer)
        for _ in range(400):
            text = "".join(rng.choices(ALPHABET, k=rng.randrange(30)))
            expected = [token for word in smollm_words(text) for token in merged(tokenizer, ranks, word)]
            assert tokenizer.encode(text) == expected, text
            assert tokenizer.decode(expected) == text


def merge_ranks(tokenizer: Tokenizer) -> dict[tuple[str, str], int]:
    merges = json.loads(tokenizer._backend.to_str())["model"]["merges"]
    return {tuple(merge): rank for rank, merge in enumerate(merges)}


def smollm_words(text: str) -> list[str]:
    """Numbers one character at a time, the rest as GPT-2 cuts it."""
    runs: list[str] = []
    for char in text:
        if is_number(char) or not runs or is_number(runs[-1]):
            runs.append(char)
        else:
            runs[-1] += char
    return [word for run in runs for word in gpt2_words(run)]


def is_number(char: str) -> bool:
    return len(char) == 1 and unicodedata.category(char).startswith("N")


def kind(char: str) -> str:
    if char.isspace():
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(char)[0], "other")


def gpt2_words(text: str) -> list[str]:
    """GPT-2's pattern by hand: contractions; letters, numbers or others after one space; spaces but for the last."""
    words: list[str] = []
    at = 0
    while at < len(text):
        contraction = re.compile(r"'(?:s|t|re|ve|m|ll|d)").match(text, at)
        start = at + (text[at] == " " and at + 1 < len(text) and kind(text[at + 1]) != "space")
        end = contraction.end() if contraction else start + 1
        if not contraction and kind(text[start]) != "space":
            while end < len(text) and kind(text[end]) == kind(text[start]):
                end += 1
        elif not contraction:
            while end < len(text) and kind(text[end]) == "space":
                end += 1
            if end < len(text) and end - at > 1:
                end -= 1
        words.append(text[at:end])
        at = end
    return words


def merged(tokenizer: Tokenizer, ranks: dict[tuple[str, str], int], word: str) -> list[int]:
    parts = list(fixtures.spell(word))
    while len(parts) > 1:
        pairs = list(pairwise(parts))
        best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        if pairs[best] not in ranks:
            break
        parts[best : best + 2] = ["".join(pairs[best])]
    return [tokenizer._backend.token_to_id(part) for part in parts]


class TestByteLevel:
    def test_control_tokens_are_hidden_and_user_defined_ones_are_not(self, tmp_path: Path) -> None:
        tokenizer = load(tmp_path, **fixtures.byte_level_fields())
        ids = tokenizer.encode("<|im_start|><think>ab<|im_end|>")
        assert ids == [1, 3, tokenizer.encode("ab")[0], 2]
        assert tokenizer.decode(ids) == "<think>ab"
        assert tokenizer.encode("<think>", parse_special=False) == [3], "no control token"

    def test_ends_of_turn_and_of_message_end_a_reply(self, tmp_path: Path) -> None:
        assert load(tmp_path, **fixtures.byte_level_fields(eot_token_id=0)).eos_ids == {0, 2}

    @pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2", "gpt-4o", "dbrx", "smaug-bpe"])
    def test_words_are_cut_as_the_reference_cuts_them(self, tmp_path: Path, pre: str) -> None:
        mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
        fields = fixtures.byte_level_fields(pre=pre, add_bos_token=False)
        described = {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre, **fields}
        reference, _ = mapping.convert_gguf_tokenizer("llama", described)
        tokenizer, rng = load(tmp_path, **fields), random.Random(pre)
        for _ in range(300):
            text = unicodedata.normalize("NFC", "".join(rng.choices(ALPHABET, k=rng.randrange(30))))
            assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids, text

    def test_granite_cuts_as_the_demo_model_does(self, tmp_path: Path) -> None:
        granite, demo = (load(tmp_path, **fixtures.byte_level_fields(pre=pre)) for pre in ("refact", "smollm"))
        assert granite.encode(ALPHABET) == demo.encode(ALPHABET)

    def test_qwen_composes_characters(self, tmp_path: Path) -> None:
        tokenizer = load(tmp_path, **fixtures.byte_level_fields(pre="qwen2"))
        assert tokenizer.encode("e\u0301") == tokenizer.encode("é")

    def test_whole_words_of_the_vocabulary_skip_the_merges_where_the_model_says_so(self, tmp_path: Path) -> None:
        fields = fixtures.byte_level_fields()
        fields["tokens"] = [*fields["tokens"], "Hello"]
        fields["token_type"] = [*fields["token_type"], NORMAL]
        last = len(fields["tokens"]) - 1
        assert load(tmp_path, **(fields | {"pre": "llama-bpe"})).encode("Hello") == [1, last]
        assert load(tmp_path, **(fields | {"pre": "smaug-bpe"})).encode("Hello") == [last]
        assert len(load(tmp_path, **(fields | {"pre": "gpt-2"})).encode("Hello")) == 5

    @pytest.mark.parametrize(("given", "count"), [(None, 1), (True, 1), (False, 0)])
    def test_llama_3_adds_its_beginning_unless_told_otherwise(
        self, tmp_path: Path, given: bool | None, count: int
    ) -> None:
        told = {} if given is None else {"add_bos_token": given}
        tokenizer = load(tmp_path, **fixtures.byte_level_fields(pre="llama-bpe", **told))
        assert tokenizer.encode("ab").count(1) == count
        assert tokenizer.encode("<|im_start|>ab").count(1) == 1

    def test_an_old_file_without_a_kind_is_read_as_it_was_made(self, tmp_path: Path) -> None:
        fields = fixtures.byte_level_fields()
        del fields["pre"]
        tokenizer = load(tmp_path, **fields)
        cut = [tokenizer.decode([token]) for token in tokenizer.encode("ab!!1291")]
        assert cut == ["ab", "!!", "129", "1"]

    def test_templates_are_found_by_name(self, tmp_path: Path) -> None:
        assert load(tmp_path, **fixtures.byte_level_fields(chat_template="{{ 1 }}")).chat_templates == {
            "default": "{{ 1 }}"
        }
        assert load(tmp_path, **fixtures.byte_level_fields()).chat_template is None


def spm(**changes: Any) -> dict[str, Any]:
    tokens = fixtures.llama_vocabulary()
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    fields = {"tokens": tokens, "token_type": types, "scores": scores, "pre": "default"}
    return fields | {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | changes


def sentencepiece(pieces: Sequence[str], scores: Sequence[float], text: str) -> list[str]:
    """SentencePiece BPE by definition: join the neighbours whose result scores best, leftmost first."""
    score = dict(zip(pieces, scores, strict=True))
    parts = list(text)
    while True:
        joined = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not joined:
            return parts
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


class TestSentencePiece:
    def test_ids_equal_the_definition_of_sentencepiece(self, tmp_path: Path) -> None:
        fields = spm()
        tokenizer, rng = load(tmp_path, "llama", **fields), random.Random(5)
        ids = {content: i for i, content in enumerate(fields["tokens"])}
        for _ in range(400):
            text = "".join(rng.choices("aabbc é漢<|s> ", k=rng.randrange(1, 16)))
            if "<s>" in text:
                continue
            spelled = "\u2581" + text.replace(" ", "\u2581")
            parts = sentencepiece(fields["tokens"][259:], fields["scores"][259:], spelled)
            expected = [1]
            for part in parts:
                expected += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
            assert tokenizer.encode(text) == expected, text
            assert tokenizer.decode(expected) == text

    def test_no_space_goes_before_a_text_where_the_file_says_so(self, tmp_path: Path) -> None:
        tokenizer = load(tmp_path, "llama", **spm(add_space_prefix=False))
        ids = tokenizer.encode(" ab")
        assert ids == [1, tokenizer._backend.token_to_id("\u2581ab")]
        assert tokenizer.decode(ids) == " ab"

    def test_a_file_that_names_no_ids_has_the_usual_ones(self, tmp_path: Path) -> None:
        fields = {name: value for name, value in spm().items() if not name.endswith("_id")}
        tokenizer = load(tmp_path, "llama", **fields)
        assert tokenizer.eos_ids == {2}
        assert tokenizer.encode("a")[0] == 1

    def test_the_beginning_may_be_switched_off(self, tmp_path: Path) -> None:
        assert 1 not in load(tmp_path, "llama", **spm(add_bos_token=False)).encode("ab")


def gemma() -> dict[str, Any]:
    """Gemma's pieces: runs of spaces and of newlines are user-defined, and scores do not tell what is joined first."""
    pieces = ["\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "\u2581ab", "\n"]
    runs = ["  ", "   ", "    ", "\n\n", "\n\n\n", "<table>"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *runs, *pieces]
    types = [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256 + [USER_DEFINED] * len(runs) + [NORMAL] * len(pieces)
    scores = [0.0] * 260 + [-1000.0] * len(runs) + [float(i) for i in range(len(pieces))]
    ids = {"padding_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "unknown_token_id": 3}
    fields = {"tokens": tokens, "token_type": types, "scores": scores, "pre": "default"}
    return fields | ids | {"add_space_prefix": False}


class TestRulesOfArchitectures:
    @pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
    def test_gemma_is_as_transformers_builds_it(self, tmp_path: Path, architecture: str) -> None:
        mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
        described = {"tokenizer_type": "llama", "pre_tokenizer_type": "default", **gemma()}
        reference, _ = mapping.convert_gguf_tokenizer(architecture, described)
        tokenizer, rng = load(tmp_path, "llama", architecture=architecture, **gemma()), random.Random(7)
        for _ in range(400):
            text = "".join(rng.choices(["a", "b", "c", " ", "  ", "\n", "é", "<table>"], k=rng.randrange(1, 12)))
            ids = tokenizer.encode(text)
            assert ids == [2, *reference.encode(text, add_special_tokens=False).ids], text
            assert tokenizer.decode(ids) == text

    def test_special_tokens_of_phi_3_take_the_white_space_behind_them(self, tmp_path: Path) -> None:
        """Its tokenizer.json says so; in GGUF nothing does, and llama.cpp knows it by the model's name."""
        fields = spm()
        fields["tokens"] = [*fields["tokens"], "<|user|>", "<|endoftext|>"]
        fields["token_type"] = [*fields["token_type"], CONTROL, CONTROL]
        fields["scores"] = [*fields["scores"], 0.0, 0.0]
        user = len(fields["tokens"]) - 2
        phi3, llama = (load(tmp_path, "llama", architecture=name, **fields) for name in ("phi3", "llama"))
        assert phi3.encode("<|user|>\n ab") == phi3.encode("<|user|>ab") == [1, user, *llama.encode("ab")[1:]]
        assert len(phi3.encode("<|endoftext|>\nab")) == len(phi3.encode("<|endoftext|>ab")) + 2
        assert len(llama.encode("<|user|>\nab")) == len(llama.encode("<|user|>ab")) + 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("model", "changes", "message"),
        [
            ("gpt2", {"pre": "deepseek-coder"}, "tokenizer.ggml.pre 'deepseek-coder' is not supported, only .*smollm"),
            ("bert", {}, "tokenizer.ggml.model 'bert' is not supported, only gpt2, llama"),
            ("gpt2", {"eos_token_id": 9999}, "tokenizer.ggml.eos_token_id 9999 is not in the vocabulary of"),
            ("gpt2", {"merges": ["a b", "x"]}, "tokenizer.ggml.merges: two pieces expected, got 'x'"),
            ("gpt2", {"merges": ["q q"]}, "the tokenizer cannot be built: .*qq"),
            ("llama", {}, "tokenizer.ggml.scores is missing"),
            ("gpt2", {"tokens": 7}, "the tokenizer cannot be built"),
            ("gpt2", {"eos_token_id": "x"}, "the tokenizer cannot be built"),
        ],
    )
    def test_what_cannot_be_rebuilt_is_named(
        self, tmp_path: Path, model: str, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ModelError, match=rf"model\.gguf: {message}"):
            load(tmp_path, model, **fixtures.byte_level_fields(**changes))

    def test_a_file_without_a_tokenizer_is_named(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ModelError, match=r"bare\.gguf: tokenizer\.ggml\.tokens is missing"):
            load_tokenizer(tmp_path / "bare.gguf")
