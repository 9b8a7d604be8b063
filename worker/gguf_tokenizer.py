"""The tokenizer inside a GGUF file: its metadata becomes the same kind of tokenizer that an HF directory has.

Two kinds are known: `gpt2`, byte-level BPE whose way of cutting text into words is named by `tokenizer.ggml.pre`, and
`llama`, SentencePiece BPE with byte fallback. A kind that cannot be rebuilt exactly is refused by name. What no entry
tells although the authors' tokenizers do it, as with Gemma's spaces, follows from the architecture.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.gguf_head import read_metadata
from worker.models import ModelError
from worker.tokenizer_files import DEFAULT_TEMPLATE, TokenizerFiles

# tokenizer.ggml.token_type, as the GGUF specification numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"  # SentencePiece's spelling of a space
GEMMA, PHI3 = ("gemma2", "gemma3"), "phi3"  # architectures whose own tokenizers have rules that no entry tells of
NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other special tokens take the white space that follows

# How the models of each kind cut text, as their authors' tokenizer.json has it.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}{_REST}"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    rf"|\p{{N}}{{1,3}}{_REST}"
)
# Old files name no kind; this is what llama.cpp, which they were made for, does with them.
_UNNAMED = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def _words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_and_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _words()])


def _split(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


# pre -> (how to cut, normaliser, whole words of the vocabulary skip the merges, adds BOS unless told otherwise)
_Kind = tuple[Callable[[], pre_tokenizers.PreTokenizer], normalizers.Normalizer | None, bool, bool]
PRE: dict[str, _Kind] = {
    "gpt-2": (_words, None, False, False),
    "smollm": (_digits_and_words, None, False, False),
    "starcoder": (_digits_and_words, None, False, False),
    "llama-bpe": (_split(_LLAMA3), None, True, True),
    "llama3": (_split(_LLAMA3), None, True, True),
    "llama-v3": (_split(_LLAMA3), None, True, True),
    "qwen2": (_split(_QWEN2), normalizers.NFC(), False, False),
    "tekken": (_split(_TEKKEN), None, True, True),
    "smaug-bpe": (_split(_LLAMA3), None, True, False),  # SmolLM3: Llama 3's, without its beginning
    "dbrx": (_split(_LLAMA3), None, False, False),  # OLMo 2, Phi-4, Granite 4
    "gpt-4o": (_split(_GPT4O), None, False, False),  # Phi-4-mini
    "refact": (_digits_and_words, None, False, False),  # Granite 3
    "default": (_split(*_UNNAMED), None, False, False),
}


def read_gguf(path: Path) -> TokenizerFiles:
    """Read the tokenizer of a GGUF file. Raises ModelError naming the file and the entry that is missing or unknown."""
    meta = _Metadata(path)
    try:
        return _read(meta)
    except ModelError:
        raise
    except Exception as error:  # entries of the wrong kind; and the library raises bare Exception, as for odd merges
        raise ModelError(f"{path}: the tokenizer cannot be built: {error}") from error


def _read(meta: "_Metadata") -> TokenizerFiles:
    tokens: list[str] = meta.required("tokens")
    model = meta.required("model")
    if model not in _BUILD:
        raise ModelError(f"{meta.path}: tokenizer.ggml.model {model!r} is not supported, only {', '.join(_BUILD)}")
    backend = _BUILD[model](meta, tokens)
    ids = {name: meta.token_id(key, tokens) for name, key in _NAMED.items()}
    ends = [meta.token_id(key, tokens) for key in _ENDS]
    return TokenizerFiles(
        backend=backend,
        named_tokens={name: tokens[number] for name, number in ids.items() if number is not None},
        eos_ids=frozenset(number for number in ends if number is not None),
        chat_templates=meta.templates(),
    )


_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_LLAMA_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # where a SentencePiece file names none
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of sequence, of turn, of message


class _Metadata:
    """The `tokenizer.*` entries of one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_metadata(path)
        if self.get("model") == "llama":
            self._entries = {f"tokenizer.ggml.{name}": number for name, number in _LLAMA_IDS.items()} | self._entries
        self.architecture = self._entries.get("general.architecture")

    def get(self, name: str, default: Any = None) -> Any:
        return self._entries.get(f"tokenizer.ggml.{name}", default)

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"{self.path}: tokenizer.ggml.{name} is missing; the file has no tokenizer to read")
        return value

    def token_id(self, name: str, tokens: list[str]) -> int | None:
        number = self.get(name)
        if number is not None and not 0 <= number < len(tokens):
            raise ModelError(f"{self.path}: tokenizer.ggml.{name} {number} is not in the vocabulary of {len(tokens)}")
        return number

    def templates(self) -> dict[str, str]:
        """`tokenizer.chat_template`, and `tokenizer.chat_template.<name>` for further ones."""
        prefix = "tokenizer.chat_template"
        named = {name.partition(prefix)[2]: text for name, text in self._entries.items() if name.startswith(prefix)}
        return {name[1:] or DEFAULT_TEMPLATE: str(text) for name, text in named.items() if name == "" or name[0] == "."}


def _byte_level(meta: _Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    pre = meta.get("pre", "default")
    if pre not in PRE:
        raise ModelError(f"{meta.path}: tokenizer.ggml.pre {pre!r} is not supported, only {', '.join(PRE)}")
    cut, normalizer, whole_words, adds_bos = PRE[pre]
    merges = [_pair(meta, merge) for merge in meta.required("merges")]
    backend = tokenizers.Tokenizer(models.BPE(_vocabulary(tokens), merges, ignore_merges=whole_words))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = cut()
    backend.decoder = decoders.ByteLevel()
    return _finish(meta, backend, tokens, adds_bos)


def _sentencepiece(meta: _Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    if meta.get("precompiled_charsmap"):
        raise ModelError(f"{meta.path}: tokenizer.ggml.precompiled_charsmap is not supported with model 'llama'")
    prefix = bool(meta.get("add_space_prefix", True))
    types, scores = meta.required("token_type"), meta.required("scores")
    if meta.architecture in GEMMA:
        tokens, types, scores = _as_gemma(tokens, types)
    unknown = meta.token_id("unknown_token_id", tokens)
    model = models.BPE(
        _vocabulary(tokens),
        _merges_by_score(tokens, scores, types),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    spell = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if prefix else spell
    joined = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)] if prefix else joined)
    return _finish(meta, backend, tokens, adds_bos=True)


_BUILD: dict[str, Callable[[_Metadata, list[str]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {content: number for number, content in enumerate(tokens)}


def _pair(meta: _Metadata, merge: str) -> tuple[str, str]:
    left, found, right = merge.partition(" ")
    if not found:
        raise ModelError(f"{meta.path}: tokenizer.ggml.merges: two pieces expected, got {merge!r}")
    return left, right


def _as_gemma(tokens: list[str], types: list[int]) -> tuple[list[str], list[int], list[float]]:
    """As Gemma's tokenizer.json has it: runs of spaces are pieces like others, and what comes first is joined first."""
    runs = [len(content) > 1 and not content.strip(" ") for content in tokens]
    spelled = [content.replace(" ", SPACE) if run else content for content, run in zip(tokens, runs, strict=True)]
    kinds = [NORMAL if run else kind for kind, run in zip(types, runs, strict=True)]
    return spelled, kinds, [-float(number) for number in range(len(tokens))]


def _merges_by_score(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result has the best score: the same as merges in the order of the scores."""
    skipped = {UNKNOWN, CONTROL, BYTE, USER_DEFINED}
    usable = {content: number for number, content in enumerate(tokens) if types[number] not in skipped}
    ranked = [
        (-scores[usable[left + right]], len(left), usable[left], usable[right], (left, right))
        for left, right in _cuts(usable)
        if left in usable and right in usable
    ]
    return [pair for *_, pair in sorted(ranked)]


def _cuts(contents: Iterable[str]) -> Iterable[tuple[str, str]]:
    return ((content[:at], content[at:]) for content in contents for at in range(1, len(content)))


def _finish(meta: _Metadata, backend: tokenizers.Tokenizer, tokens: list[str], adds_bos: bool) -> tokenizers.Tokenizer:
    """Add the tokens that are matched whole in any text, and what goes around a text."""
    kinds = zip(tokens, meta.get("token_type", []), strict=False)
    whole = [(content, kind) for content, kind in kinds if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    backend.add_tokens([_whole(meta, text, kind) for text, kind in whole])
    bos = meta.token_id("bos_token_id", tokens) if meta.get("add_bos_token", adds_bos) else None
    eos = meta.token_id("eos_token_id", tokens) if meta.get("add_eos_token", False) else None
    around = [number for number in (bos, eos) if number is not None]
    if around:
        single = [*([tokens[bos]] if bos is not None else []), "$A", *([tokens[eos]] if eos is not None else [])]
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(tokens[number], number) for number in dict.fromkeys(around)]
        )
    return backend


def _whole(meta: _Metadata, text: str, kind: int) -> AddedToken:
    strips = meta.architecture == PHI3 and meta.get("model") == "llama" and text not in NOT_STRIPPING
    return AddedToken(text, normalized=False, special=kind != USER_DEFINED, rstrip=strips)
