"""Small tokenizers of every kind, saved as models save them, and the demo model's real one."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from engine.wire import EngineInfo
from worker.models import resolve_model
from worker.pieces import BYTE_OF
from worker.text import ReplyText
from worker.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BYTE_SPELLING = {byte: character for character, byte in BYTE_OF.items()}


def spell(text: str | bytes) -> str:
    """Text as a byte-level vocabulary spells it."""
    return "".join(BYTE_SPELLING[byte] for byte in (text.encode() if isinstance(text, str) else text))


def byte_level_backend(words: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Three control tokens, the 256 bytes, and `words`, each of which has one token (no merges lead to it)."""
    contents = [*SPECIALS, *(BYTE_SPELLING[byte] for byte in range(256))]
    contents += [spelled for word in words if (spelled := spell(word)) not in contents]
    backend = tokenizers.Tokenizer(models.BPE({content: i for i, content in enumerate(contents)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(content, normalized=False) for content in SPECIALS])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    contents = [
        "<unk>",
        "<s>",
        "</s>",
        "\u2581",
        "\u2581Hello",
        "\u2581world",
        "\u2581again",
        "Hello",
        "!",
        "\u2581\u2581a",
        "é",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE({content: i for i, content in enumerate(contents)}, [], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(content, normalized=False) for content in contents[:3]])
    return backend


def llama_vocabulary() -> list[str]:
    pieces = ["\u2581", "a", "b", "c", "é", "\u2581a", "ab", "\u2581ab", "bc", "\u2581\u2581", "<", "|", "<|", "s", ">"]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]


def llama_backend(*, bos: bool = True) -> tokenizers.Tokenizer:
    """Shaped like Llama 2's tokenizer.json: byte fallback, a space before every text, BOS."""
    contents = llama_vocabulary()
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "ab"), ("b", "c"), ("\u2581", "\u2581"), ("<", "|")]
    vocabulary = {content: i for i, content in enumerate(contents)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    stages = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(stages)
    backend.add_special_tokens([AddedToken(content, normalized=False) for content in contents[:3]])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def word_backend() -> tokenizers.Tokenizer:
    """Whole words and no decoder: tokens are joined by spaces."""
    words = ["<unk>", "<eos>", "the", "cat", "sat", "mat"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<eos>", normalized=False)])
    return backend


def wordpiece_backend() -> tokenizers.Tokenizer:
    words = ["[UNK]", "play", "##ing", "ground", "##s", ",", "do", "n't"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return backend


def save(directory: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """A model directory with the two files that a tokenizer has."""
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def loaded(backend: tokenizers.Tokenizer, **config: Any) -> Tokenizer:
    """The worker's tokenizer from the files of a backend."""
    with TemporaryDirectory() as directory:
        return load_tokenizer(save(Path(directory), backend, **config))


@cache
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2"))


def engine_info(**changes: Any) -> EngineInfo:
    values = {"model": "tiny", "numerics": "none", "device": "cpu", "dtype": "float32", "deterministic": True}
    values |= {"vocab_size": 300, "max_model_len": 128, "block_size": 16, "kv_blocks": 16, "capacity_tokens": 256}
    return EngineInfo(**(values | {"max_sequences": 8, "eos_token_ids": []} | changes))


def ids_of(tokenizer: Tokenizer, *pieces: str | bytes) -> list[int]:
    """One token per piece, spelled exactly so."""
    backend = tokenizer._backend
    found = [backend.token_to_id(p if isinstance(p, str) and p.startswith("<|") else spell(p)) for p in pieces]
    assert None not in found, pieces
    return [token for token in found if token is not None]


def reply(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), **options: Any) -> ReplyText:
    text = ReplyText(tokenizer, prompt, **options)
    text.push(ids)
    return text


def write_gguf(path: Path, model: str = "gpt2", architecture: str = "llama", **fields: Any) -> Path:
    """A GGUF file with a tokenizer and no tensors. `fields` are `tokenizer.ggml.*` entries."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key if name != "chat_template" else "tokenizer.chat_template", value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_fields(**changes: Any) -> dict[str, Any]:
    """Control tokens, 256 bytes, and merges over a small alphabet."""
    merges = ["Ġ a", "a b", "1 2", "12 9", "Ġa b", "! !", "a A", "' s", "Ġ Ġ", "Ċ Ċ"]
    tokens = [*SPECIALS, "<think>", *(BYTE_SPELLING[byte] for byte in range(256))]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 4)
    fields = {"pre": "smollm", "tokens": tokens, "token_type": types, "merges": merges}
    return fields | {"bos_token_id": 1, "eos_token_id": 2} | changes


def as_transformers(tokenizer: Tokenizer, directory: Path) -> Any:
    """The tokenizer as transformers loads it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer._backend.save(str(directory / "tokenizer.json"))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        chat_template=tokenizer.chat_template,
        **tokenizer.named_tokens,
    )


def reference_ids(reference: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """What transformers makes of a conversation."""
    return reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **options)["input_ids"]
