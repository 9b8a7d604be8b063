"""Text to tokens and back, for one model. Wraps `tokenizers`, whose meaning it keeps, but for the points below.

- Truncation and padding that a tokenizer.json may ask for are off: a prompt is never cut silently.
- Encoding runs outside Python's global lock, so a thread that encodes megabytes delays nobody.
- There is exactly one beginning-of-sequence token where the tokenizer adds one, also if the text spells it already.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import takewhile
from pathlib import Path

import msgspec
import tokenizers

from worker import pieces
from worker.control import ControlTokens, PromptError
from worker.gguf_tokenizer import read_gguf
from worker.shortest import bound_of
from worker.stops import Symbol
from worker.tokenizer_files import TokenizerFiles, read_directory

# A prompt is encoded by the thread that asked for it. The library's own threads would take the engine's cores, and it
# prints a warning on standard error, which is for log lines, when a process that has them makes another.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PLACEHOLDERS = [chr(0xF0000 + i) for i in range(512)]  # private use; stand for spans that must stay plain text
BATCH = 500  # texts handed to the library at once: what it does before and after it, it does with Python's lock
_PLACEHOLDER = re.compile(f"([{PLACEHOLDERS[0]}-{PLACEHOLDERS[-1]}])")  # a range: a list is tried one by one


def load_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of an HF directory or of a GGUF file. Raises ModelError naming the file at fault."""
    return Tokenizer(read_directory(path) if path.is_dir() else read_gguf(path))


class TooManyTokens(PromptError):
    """A text has `count` tokens or more, which is above what was asked for."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens")
        self.count = count


class Tokenizer:
    """Encodes, decodes, and knows the control tokens, the end-of-sequence ids and the chat templates of a model.

    `named_tokens` are those that a chat template may use (bos_token, eos_token, …). `digest` changes with everything
    that decides which ids a prompt gets. All methods may be called from several threads at once.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        backend = files.backend
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        self._backend = backend
        self._plain = _twin(backend)
        self._plain.encode_special_tokens = True
        self._bos_id = _added_first(backend)
        self.control = ControlTokens(special)
        self.special_ids = frozenset(special.values())
        self.pieces = pieces.PieceTable(backend, self.special_ids)
        self.eos_ids = files.eos_ids
        self.named_tokens = files.named_tokens
        self.chat_templates = files.chat_templates
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.digest = _digest(files)
        self._bound = bound_of(backend)

    @property
    def chat_template(self) -> str | None:
        """The template of chat jobs: the one named default, or the only one."""
        if len(self.chat_templates) == 1:
            return next(iter(self.chat_templates.values()))
        return self.chat_templates.get("default")

    def encode(
        self, text: str, parse_special: bool = True, add_special: bool = True, at_most: int | None = None
    ) -> list[int]:
        """The ids of a text. Without `parse_special` control tokens in it are plain text.

        `add_special` adds what the tokenizer puts around a text. Raises PromptError for text that is no Unicode, and
        TooManyTokens for more than `at_most`: Python's lock is kept while they become a list, so that is not done.
        """
        (ids,) = _encode(self._backend if parse_special else self._plain, [text], add_special, at_most)
        begins = sum(1 for _ in takewhile(self._bos_id.__eq__, ids)) if add_special and self._bos_id is not None else 0
        return ids[max(begins - 1, 0) :]

    def fewest(self, text: str) -> int:
        """How many tokens a text has at least, quickly; 0 where only its encoding would tell. Raises PromptError."""
        try:
            return 0 if self._bound is None else self._bound.fewest(text)
        except UnicodeEncodeError as error:
            raise PromptError(f"text that is no valid Unicode: {error}") from error

    def encode_guarded(self, text: str, hidden: Mapping[str, str], at_most: int | None = None) -> list[int]:
        """The ids of a rendered chat in which the placeholders `hidden` stand for text that must not be parsed.

        Raises as `encode` does.
        """
        first, *rest = _PLACEHOLDER.split(text) if hidden else [text]
        marks = sorted(set(rest[::2]))
        plain = dict(zip(marks, _encode_inside(self._plain, [hidden.get(m, m) for m in marks]), strict=True))
        ids = self.encode(first, add_special=False, at_most=at_most)
        for start in range(0, len(rest), 2 * BATCH):
            batch = rest[start : start + 2 * BATCH]
            for mark, after in zip(batch[::2], _encode_inside(self._backend, batch[1::2]), strict=True):
                ids += plain[mark] + after
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of some ids, without any clean-up. Ids that the tokenizer does not have are no text."""
        return pieces.decode(self.pieces, ids, skip_special=skip_special)

    def content(self, token: int) -> str | None:
        """How the vocabulary spells an id."""
        return self._backend.id_to_token(token)

    def symbols(self, text: str) -> tuple[Symbol, ...]:
        """The characters of a text, with an id in place of each control token that it spells."""
        return self.control.symbols(text)


def _encode(
    backend: tokenizers.Tokenizer, texts: Sequence[str], add_special: bool = False, at_most: int | None = None
) -> list[list[int]]:
    """`encode_batch_fast` lets other threads run, which `encode` does not."""
    try:
        found = backend.encode_batch_fast(texts, add_special_tokens=add_special)
        count = sum(map(len, found))
        if at_most is not None and count > at_most:
            raise TooManyTokens(count)
        return [encoding.ids for encoding in found]
    except (UnicodeEncodeError, TypeError) as error:
        raise PromptError(f"text that is no valid Unicode: {error}") from error


def _encode_inside(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of texts that stand inside longer ones: without the space that some tokenizers put before a beginning.

    Each is encoded after a line end, whose ids are taken off again, or by itself where it joined the line end.
    """
    line_end, *found = _encode(backend, ["\n", *("\n" + text for text in texts)])
    joined = [i for i, ids in enumerate(found) if ids[: len(line_end)] != line_end]
    alone = dict(zip(joined, _encode(backend, [texts[i] for i in joined]), strict=True))
    return [alone[i] if i in alone else ids[len(line_end) :] for i, ids in enumerate(found)]


def _twin(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer with switches of its own that shares the vocabulary, which is nearly all of the memory."""
    twin = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(twin, part, value)
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([added[number] for number in sorted(added)])
    assert twin.get_added_tokens_decoder() == added, "the library counts added tokens on from the vocabulary"
    return twin


def _added_first(backend: tokenizers.Tokenizer) -> int | None:
    """The token that the tokenizer puts before every text, if it does."""
    bare: Sequence[int] = backend.encode("a", add_special_tokens=False).ids
    whole: Sequence[int] = backend.encode("a", add_special_tokens=True).ids
    return whole[0] if len(whole) > len(bare) and whole[1 : 1 + len(bare)] == bare else None


def _digest(files: TokenizerFiles) -> str:
    rest = msgspec.json.encode([files.named_tokens, sorted(files.eos_ids), files.chat_templates])
    return sha256(files.backend.to_str().encode() + b"\0" + rest).hexdigest()[:32]
