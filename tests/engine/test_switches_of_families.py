"""The keys of config.json that transformers' own code reads: none may be one that we call harmless, or do not know."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.families import COMMON, FAMILIES, HARMLESS

ABOUT_TRAINING_OR_PADDING = {"_attn_implementation", "attention_dropout", "pad_token_id", "resid_pdrop"}
ABOUT_IMAGES = {"get_text_config", "image_token_id", "mm_tokens_per_image", "text_config", "vision_config"}
REFUSED = {"attn_logit_softcapping", "use_bidirectional_attention"}  # unless they are null or false


@pytest.mark.parametrize("family", FAMILIES)
def test_no_switch_that_transformers_reads_is_overlooked(family: str) -> None:
    read = _keys_read(family.removesuffix("_text"))
    assert {"hidden_size", "num_attention_heads"} <= read, "this test does not find what is read any more"

    assert read & HARMLESS <= ABOUT_TRAINING_OR_PADDING
    ours = HARMLESS | COMMON | FAMILIES[family].keys | FAMILIES[family].ignored.keys()
    assert read - ours <= (ABOUT_IMAGES | REFUSED if family == "gemma3_text" else set())


def _keys_read(name: str) -> set[str]:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "models" / name / f"modeling_{name}.py"
    return set(re.findall(r"\bconfig\.(\w+)", source.read_text(encoding="utf-8")))
