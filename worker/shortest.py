"""How few tokens a text can become, known from its length: what cannot fit is refused before it is tokenised."""

import json
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models

from worker.pieces import BYTE_OF

LONGEST_DECOMPOSITION = 4  # the most characters that NFC makes one of (Unicode Standard Annex 15; U+1F82 is one)
CUTS = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}  # pre-tokenizers that keep every character


class Bound(NamedTuple):
    """One token stands for at most `longest` characters of a text, or bytes: those that are not in `unknown`."""

    longest: int
    unknown: bytes | None

    def fewest(self, text: str) -> int:
        """How many tokens a text has at least. Raises UnicodeEncodeError for one that is no Unicode."""
        known = text if self.unknown is None else text.encode().translate(None, self.unknown)
        return -(-len(known) // self.longest)


def bound_of(backend: tokenizers.Tokenizer) -> Bound | None:
    """The bound of a tokenizer; None where it has none that we know.

    A token of a BPE model stands for as many characters (in byte-level ones: bytes) as its own content has, or fewer,
    unless it is the unknown one, or takes the space beside it along, or the text is rewritten before.
    """
    cuts, normalizer = _stages(backend.pre_tokenizer, "pretokenizers"), _stages(backend.normalizer, "normalizers")
    rewriting, unknown = _shrinking(normalizer), _unknown(backend, cuts)
    greedy = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if greedy or rewriting is None or unknown is None or not _keeps_all(cuts):
        return None
    if normalizer or not _byte_level(cuts):
        return None if unknown else Bound(rewriting * _longest(backend), None)
    return Bound(_longest(backend), unknown)


def _longest(backend: tokenizers.Tokenizer) -> int:
    return max(map(len, backend.get_vocab(with_added_tokens=True)))


def _stages(part: Any, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    stage = json.loads(part.__getstate__())
    return stage[inner] if stage["type"] == "Sequence" else [stage]


def _shrinking(stages: list[dict[str, Any]]) -> int | None:
    """How many characters the normaliser can at most make one of."""
    factor = 1
    for stage in stages:
        if stage["type"] == "NFC":
            factor *= LONGEST_DECOMPOSITION
        elif stage["type"] == "Replace":
            pattern = stage["pattern"].get("String")
            if pattern is None or len(pattern) > len(stage["content"]):
                return None
        elif stage["type"] != "Prepend":
            return None
    return factor


def _keeps_all(stages: list[dict[str, Any]]) -> bool:
    return all(stage["type"] in CUTS and stage.get("behavior") != "Removed" for stage in stages)


def _byte_level(stages: list[dict[str, Any]]) -> bool:
    return any(stage["type"] == "ByteLevel" for stage in stages)


def _unknown(backend: tokenizers.Tokenizer, cuts: list[dict[str, Any]]) -> bytes | None:
    """The bytes that have no token: they vanish, or are one unknown token in a row. None where characters may, too."""
    if not isinstance(backend.model, models.BPE):
        return None
    if _byte_level(cuts):
        return bytes(byte for character, byte in BYTE_OF.items() if backend.token_to_id(character) is None)
    if not backend.model.byte_fallback:
        return None
    return bytes(byte for byte in range(256) if backend.token_to_id(f"<0x{byte:02X}>") is None)
