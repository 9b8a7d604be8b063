"""Added tokens that stand in tokenizer_config.json alone, or otherwise than in tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.worker import text_fixtures as fixtures
from worker.models import ModelError
from worker.tokenizer import load_tokenizer

TEXT = "<a>ab<b>abc<|im_end|>  c"


def listed(content: str, **switches: bool) -> dict[str, Any]:
    off = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return off | {"content": content} | switches


@pytest.mark.parametrize(
    "tokens",
    [
        {"260": listed("<b>"), "259": listed("<a>", special=True)},
        {"1000": listed("<b>"), "259": listed("<a>", special=True)},  # not as text, where 1000 comes first
        {"259": listed("ab", special=True), "102": listed("c")},
        {"2": listed("<|im_end|>", special=True, rstrip=True)},
        {"2": listed("<|im_end|>")},
        {"259": {"content": "<a>"}},
    ],
    ids=str,
)
def test_added_tokens_that_only_the_config_lists_are_those_of_transformers(tmp_path: Path, tokens: Any) -> None:
    directory = fixtures.save(tmp_path, fixtures.byte_level_backend(), added_tokens_decoder=tokens)
    oracle, tokenizer = PreTrainedTokenizerFast.from_pretrained(directory), load_tokenizer(directory)
    ids = oracle(TEXT)["input_ids"]
    assert tokenizer.encode(TEXT) == ids
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "tokens",
    [["x"], {"x": listed("a")}, {"3": "a"}, {"3": {"content": 1}}, {"3": {"content": "a", "special": "no"}}],
    ids=str,
)
def test_added_tokens_that_are_none_are_refused_by_file_and_name(tmp_path: Path, tokens: Any) -> None:
    directory = fixtures.save(tmp_path, fixtures.byte_level_backend())
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        load_tokenizer(directory)
