"""What each token adds to a text: the decoder of a tokenizer.json, taken apart so that it can run token by token.

A text is the concatenation of its tokens' pieces, so a stream equals the decoding of the whole at every point. Pieces
are bytes (byte-level vocabularies, and the `<0xE2>` tokens of byte fallback) or characters; only bytes wait for more.

Bytes that are no UTF-8 become U+FFFD: one for each broken character in a byte-level vocabulary (as Rust's and Python's
lossy decoding), one for each stray byte in a byte-fallback one (as SentencePiece; the `tokenizers` library rewrites
characters that came before the stray byte, which no stream can do).
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence

import tokenizers

from worker.models import ModelError

REPLACEMENT = "\ufffd"
LONGEST_PENDING_BYTES = 3  # a UTF-8 character has at most four bytes, so an unfinished one has at most three
PER_TOKEN = {"Replace", "ByteFallback", "Metaspace", "WordPiece", "Strip"}  # decoders that look at one token at a time
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _one_per_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("gllm.one_per_byte", _one_per_byte)


class PieceTable:
    """The piece of every token of one tokenizer. Raises ModelError for a decoder that cannot run token by token."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self.special_ids = special_ids
        shape = DecoderShape(_json_of(backend.decoder))
        self.byte_level = shape.byte_level
        self.strip = shape.strip
        self.errors = "replace" if shape.byte_level else "gllm.one_per_byte"
        self._byte_fallback = shape.byte_fallback
        self._decoder = shape.per_token
        self._pieces: dict[int, bytes | str | None] = {}
        self._lead = self._decode(["a"])

    def piece(self, token: int) -> bytes | str | None:
        """The piece of a token that others came before; None for an id that the tokenizer does not have."""
        if token not in self._pieces:
            self._pieces[token] = self._find(token, first=False)
        return self._pieces[token]

    def first_piece(self, token: int) -> bytes | str | None:
        """The piece of a token that begins a text: some decoders drop its leading space or write none before it."""
        return self.piece(token) if self.byte_level else self._find(token, first=True)

    def _find(self, token: int, first: bool) -> bytes | str | None:
        content = self._backend.id_to_token(token)
        if content is None:
            return None
        if self.byte_level:
            return token_bytes(content)
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(content)):
            return bytes.fromhex(byte[1])
        return self._decode([content]) if first else self._decode(["a", content]).removeprefix(self._lead)

    def _decode(self, contents: list[str]) -> str:
        return " ".join(contents) if self._decoder is None else self._decoder.decode(contents)


class DecoderShape:
    """What a tokenizer.json's decoder does, told apart into what a stream needs to know.

    `per_token` is the part that looks at single tokens, None when the tokenizer has no decoder (tokens are joined by
    spaces); `strip` is the character and the greatest number of it that is dropped where a text begins.
    """

    def __init__(self, decoder: dict | None) -> None:
        stages = _flatten(decoder)
        kinds = [stage["type"] for stage in stages]
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        self.strip = ("", 0)
        if "Fuse" in kinds:
            fuse = kinds.index("Fuse")
            self.strip = _leading_strip(stages[fuse + 1 :])
            stages = stages[:fuse]
        _check(stages)
        self.per_token = None if decoder is None else _build(stages)


def _json_of(decoder: tokenizers.decoders.Decoder | None) -> dict | None:
    return None if decoder is None else json.loads(decoder.__getstate__())


def _flatten(decoder: dict | None) -> list[dict]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [stage for inner in decoder["decoders"] for stage in _flatten(inner)]
    return [decoder]


def _check(stages: list[dict]) -> None:
    """Byte fallback joins tokens, so nothing may look at single tokens after it."""
    kinds = [stage["type"] for stage in stages]
    known = {"ByteLevel"} if "ByteLevel" in kinds else PER_TOKEN
    for position, kind in enumerate(kinds):
        if kind not in known or "ByteFallback" in kinds[:position]:
            raise ModelError(f"tokenizer.json: the decoder {kind!r} cannot be streamed token by token here")


def _leading_strip(stages: list[dict]) -> tuple[str, int]:
    """What comes after the tokens were joined may only strip the beginning: anything else would rewrite what is out."""
    stages = [stage for stage in stages if stage["type"] != "Fuse"]
    if not stages:
        return "", 0
    if len(stages) > 1 or stages[0]["type"] != "Strip" or stages[0]["stop"]:
        raise ModelError(f"tokenizer.json: the decoder {stages!r} after Fuse cannot be streamed token by token")
    return stages[0]["content"], stages[0]["start"]


def _build(stages: list[dict]) -> tokenizers.decoders.Decoder:
    """A decoder of its own from its JSON, which only a whole tokenizer can be read from."""
    decoder = {"type": "Sequence", "decoders": stages}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    shell = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "decoder": decoder}))
    assert shell.decoder is not None
    return shell.decoder


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones of Latin-1 stand for themselves, the others are counted from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def token_bytes(content: str) -> bytes:
    """The bytes of a byte-level token; an added token that is not spelled in the byte alphabet is its own text."""
    try:
        return bytes([BYTE_OF[character] for character in content])
    except KeyError:
        return content.encode()


class TextDecoder:
    """Turns tokens into text, one at a time: `push` gives what is certain now, `flush` what an end here would add.

    Starts after `prompt`, whose text is not given again. A character that the prompt leaves unfinished and the tokens
    complete belongs to them.
    """

    def __init__(self, table: PieceTable, prompt: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(table.errors)
        self._first = True
        self._strip_character, self._strip = table.strip
        self._owed = 0  # U+FFFD that the prompt's own text ends with: not to be given again
        self._read_prompt(prompt)

    def push(self, token: int) -> str:
        """The text that is certain after this token."""
        text = self._stripped(self._characters(token))
        return self._without_owed(text) if self._owed and text else text

    def flush(self) -> str:
        """U+FFFD for the bytes that wait for the rest of their character. Changes nothing."""
        text = self._pending().decode("utf-8", self._table.errors)
        return text.removeprefix(REPLACEMENT * min(self._owed, len(text)))

    def _characters(self, token: int) -> str:
        if token in self._skipped:
            return ""
        piece = self._table.first_piece(token) if self._first else self._table.piece(token)
        if piece is None:
            return ""
        self._first = False
        if isinstance(piece, bytes):
            return self._utf8.decode(piece)
        return self._utf8.decode(b"", final=True) + piece  # characters end a run of bytes

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._strip_character:
                self._strip = 0
            else:
                text, self._strip = text[1:], self._strip - 1
        return text

    def _without_owed(self, text: str) -> str:
        kept = text.lstrip(REPLACEMENT)
        dropped = min(self._owed, len(text) - len(kept))
        self._owed = 0
        return text[dropped:]

    def _pending(self) -> bytes:
        return self._utf8.getstate()[0]

    def _read_prompt(self, prompt: Sequence[int]) -> None:
        """Come to the state after the prompt without decoding all of it: its beginning and its last bytes decide."""
        for token in prompt:
            if not (self._first or self._strip):
                break
            self.push(token)
        self._utf8.reset()
        for piece in reversed(list(self._last_pieces(prompt))):
            self._utf8.decode(piece)
        self._owed = len(self.flush())

    def _last_pieces(self, prompt: Sequence[int]) -> Iterator[bytes]:
        """The pieces that can hold an unfinished character, last one first."""
        wanted = LONGEST_PENDING_BYTES
        for token in reversed(prompt):
            piece = None if token in self._skipped else self._table.piece(token)
            if piece is None:
                continue
            if isinstance(piece, str):
                return
            yield piece
            wanted -= len(piece)
            if wanted <= 0:
                return


def decode(table: PieceTable, ids: Iterable[int], *, skip_special: bool = True) -> str:
    """The text of a list of tokens. The one definition of it: streams are checked against this."""
    decoder = TextDecoder(table, skip_special=skip_special)
    return "".join([decoder.push(token) for token in ids]) + decoder.flush()
