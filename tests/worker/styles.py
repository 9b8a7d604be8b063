"""Tokenizers of every style that models use, trained on a few lines: the pipelines are the published ones."""

from collections.abc import Callable, Sequence
from functools import cache

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog, and it didn't care; 1234567 dogs (or 89) did.",
    "def f(x):\n    return x + 1  # ok\n\n\n\tif x != 2: print('a  b')\r\n",
    "Grüße aus Köln: das Mädchen aß süße Äpfel. Ça va? L'été à Paris.",
    "漢字とかなの文章。日本語のテキストです。 中文句子在这里,没有空格。",
    "Привет, мир! Как дела? Это предложение.",
    "😀😃 👩‍👩‍👧‍👦 e\u0301 नमस्ते दुनिया 안녕하세요 세계",
    "<|im_start|>user\nhi<|im_end|> [INST] x [/INST] <s> </s>",
    "   leading, trailing   and\u00a0odd\u2003spaces   ",
]
GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_SPLIT = GPT4_SPLIT.replace("{1,3}", "")
ADDED = [  # what models add: control tokens, tokens that eat the space beside them, words, plain ones
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
    AddedToken("<mask>", special=True, normalized=True, lstrip=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("quickly", special=False, normalized=True, single_word=True),
    AddedToken("été", special=False, normalized=True),
    AddedToken("\n\n\n", special=False, normalized=False),
]
SPACE = "\u2581"


def trained(backend: tokenizers.Tokenizer, trainer: type, **options: object) -> tokenizers.Tokenizer:
    backend.train_from_iterator(LINES * 3, trainer(show_progress=False, **options))
    backend.add_tokens(ADDED)
    return backend


def byte_level(split: str | None, normalizer: normalizers.Normalizer | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=split is GPT4_SPLIT))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    cut = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, bytes_of])
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(backend, trainers.BpeTrainer, vocab_size=500, special_tokens=specials, initial_alphabet=alphabet)
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return backend


def byte_fallback(strip: int, *, gemma: bool = False, scheme: str | None = None) -> tokenizers.Tokenizer:
    """Llama 2 and Phi 3 (a normaliser puts the space before), newer Llama 2 and Mistral (Metaspace does), Gemma."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme is not None:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    elif gemma:
        backend.normalizer = normalizers.Replace(" ", SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    stages = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*stages, decoders.Strip(" ", strip, 0)] if strip else stages)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained(backend, trainers.BpeTrainer, vocab_size=460, special_tokens=specials, limit_alphabet=60)
    return _without_special_bytes(backend)


def _without_special_bytes(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer with its byte tokens as plain entries: the trainer can only keep them as special ones."""
    fresh = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(fresh, part, value)
    fresh.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    fresh.add_tokens(ADDED)
    fresh.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return fresh


def unigram(scheme: str) -> tokenizers.Tokenizer:
    """T5's and XLM-R's way: pieces with probabilities, and a space before a text always, first or never."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    specials = ["<pad>", "</s>", "<unk>"]
    return trained(backend, trainers.UnigramTrainer, vocab_size=300, special_tokens=specials, unk_token="<unk>")


def word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return trained(backend, trainers.WordPieceTrainer, vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"])


STYLES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": lambda: byte_level(None),
    "llama3": lambda: byte_level(GPT4_SPLIT),
    "qwen2": lambda: byte_level(QWEN_SPLIT, normalizers.NFC()),
    "llama2": lambda: byte_fallback(1),
    "llama2-metaspace": lambda: byte_fallback(1, scheme="first"),
    "mistral": lambda: byte_fallback(1, scheme="always"),
    "no-prefix": lambda: byte_fallback(0, scheme="never"),
    "gemma": lambda: byte_fallback(0, gemma=True),
    "two-spaces": lambda: byte_fallback(2),
    "unigram-always": lambda: unigram("always"),
    "unigram-first": lambda: unigram("first"),
    "unigram-never": lambda: unigram("never"),
    "wordpiece": word_piece,
}


@cache
def style(name: str) -> tokenizers.Tokenizer:
    return STYLES[name]()


def library_text(backend: tokenizers.Tokenizer, ids: Sequence[int], skip_special: bool) -> str:
    """What the library decodes, runs of byte tokens that are no UTF-8 replaced by what SentencePiece makes of them.

    (The library would replace every byte of such a run, also those of whole characters that a stream has shown.)
    """
    added = backend.get_added_tokens_decoder()
    kept = [token for token in ids if not (skip_special and token in added and added[token].special)]
    return backend.decode(_valid_runs(backend, kept), skip_special_tokens=skip_special)


def _valid_runs(backend: tokenizers.Tokenizer, ids: Sequence[int]) -> list[int]:
    valid: list[int] = []
    run = b""
    for token in [*ids, -1]:
        content = backend.id_to_token(token) if token >= 0 else ""
        if content is None:
            continue
        if len(content) == 6 and content.startswith("<0x"):
            run += bytes.fromhex(content[3:5])
            continue
        found = [backend.token_to_id(f"<0x{byte:02X}>") for byte in sentencepiece_bytes(run).encode()]
        valid, run = [*valid, *(number for number in found if number is not None), token], b""
    return valid[:-1]


def sentencepiece_bytes(data: bytes) -> str:
    """Bytes as text; each one that belongs to no character is a U+FFFD of its own."""
    text = ""
    while data:
        for length in (1, 2, 3, 4):
            try:
                text, data = text + data[:length].decode(), data[length:]
                break
            except UnicodeDecodeError:
                continue
        else:
            text, data = text + "\ufffd", data[1:]
    return text
