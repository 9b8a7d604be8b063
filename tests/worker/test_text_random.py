"""Random token lists and stop strings against the definition of published text, each written down a second time."""

import random
from collections.abc import Sequence

import pytest

from tests.worker import text_fixtures as fixtures
from tests.worker.text_fixtures import ids_of, reply
from worker.text import ReplyText
from worker.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return fixtures.loaded(fixtures.byte_level_backend(["ABC", "DEF", "ab", "ba", "aab", "bb", "abc"]))


def llama_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Llama's decoder, written down once more: byte runs as SentencePiece reads them, one space off the beginning."""
    text, run = "", b""
    for token in [*ids, -1]:
        content = tokenizer.content(token) if token >= 0 else ""
        if token in tokenizer.special_ids or content is None:
            continue
        if content.startswith("<0x"):
            run += bytes([int(content[3:5], 16)])
        else:
            text, run = text + sentencepiece_bytes(run) + content.replace("\u2581", " "), b""
    return text.removeprefix(" ")


def sentencepiece_bytes(data: bytes) -> str:
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


def library_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer._backend.decode(list(ids), skip_special_tokens=True)


KINDS = {
    "byte_level": (fixtures.byte_level_backend, library_text),
    "metaspace": (fixtures.metaspace_backend, library_text),
    "byte_fallback": (fixtures.llama_backend, llama_text),
    "no_decoder": (fixtures.word_backend, library_text),
    "wordpiece": (fixtures.wordpiece_backend, library_text),
}
UTF8 = [text.encode() for text in ("a", "é", "漢", "😀", "\ufffd", "\u0301", " ")]


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Any ids, and often the bytes of real characters, some of them cut."""
    ids: list[int] = []
    while rng.random() < 0.9:
        name = rng.choice(["<0x{:02X}>", "byte", "any", "any"])
        data = rng.choice(UTF8)[: rng.choice([4, 4, 4, 2, 1])]
        contents = [name.format(b) if "{" in name else fixtures.BYTE_SPELLING[b] for b in data]
        found = [tokenizer._backend.token_to_id(content) for content in contents]
        if name == "any" or None in found:
            found = [rng.randrange(tokenizer.vocab_size + 2)]
        ids += [token for token in found if token is not None]
    return ids


def taken_off(whole: str, prompt: str) -> str:
    """The prompt's text taken off, as far as it is still there: the reply may complete the prompt's last character."""
    same = next((i for i, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
    return whole[same:]


@pytest.mark.parametrize("kind", KINDS)
def test_random_streams_equal_the_decoding_of_the_whole(kind: str) -> None:
    build, text_of = KINDS[kind]
    tokenizer, rng = fixtures.loaded(build()), random.Random(kind)
    for _ in range(4000):
        prompt, output = random_ids(tokenizer, rng), random_ids(tokenizer, rng)
        text, base = ReplyText(tokenizer, prompt), text_of(tokenizer, prompt)
        for i, token in enumerate(output):
            before = text.text
            text.push([token])
            assert text.text.startswith(before)
            assert text.offsets[i] == len(text.text)
            assert text.text + text.tail() == taken_off(text_of(tokenizer, prompt + output[: i + 1]), base)
            assert text.tail() in ("", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd")
        assert tokenizer.decode(output) == text_of(tokenizer, output)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_takes_over_goes_on_with_the_same_text(kind: str) -> None:
    tokenizer, rng = fixtures.loaded(KINDS[kind][0]()), random.Random(kind)
    for _ in range(300):
        prompt, output = random_ids(tokenizer, rng), random_ids(tokenizer, rng)
        options = {"stops": ["a", "é漢", " a"][: rng.randrange(4)], "min_tokens": rng.randrange(3), "max_tokens": 20}
        first = reply(tokenizer, output, prompt, **options)
        cut = rng.randrange(len(first.ids) + 1)
        second = reply(tokenizer, first.ids[:cut], prompt, **options)
        assert (second.text, second.offsets) == (first.between(0, cut), first.offsets[:cut])
        second.push(output[cut:])
        assert (second.text, second.offsets, second.ids) == (first.text, first.offsets, first.ids)
        assert (second.tail(), second.ending) == (first.tail(), first.ending)


MARK = "\ue000"  # the control token, in the definition's text


def stops_by_definition(pieces: Sequence[str], stops: Sequence[str], include: bool, min_tokens: int):
    """(text, tail, stop) by trying every stop string at every character. `<|im_end|>` in pieces is MARK."""
    full, out = "", ""
    for count, piece in enumerate(pieces, 1):
        for symbol in piece:
            full += symbol
            seen = full.replace(MARK, "")
            ends = [s for s in stops if symbol != MARK and seen.endswith(s)]
            ends += [s for s in stops if "<|im_end|>" in s and full.endswith(s.replace("<|im_end|>", MARK))]
            if ends and count > min_tokens:
                widths = [len(s if seen.endswith(s) and symbol != MARK else s.replace("<|im_end|>", "")) for s in ends]
                return (seen if include else seen[: len(seen) - max(widths)]), "", True
        seen = full.replace(MARK, "")
        held = [len(k) for s in stops for k in beginnings(s) if seen.endswith(k)]
        marked = [s.replace("<|im_end|>", MARK) for s in stops if "<|im_end|>" in s]
        held += [len(k.replace(MARK, "")) for s in marked for k in beginnings(s) if full.endswith(k)]
        out = seen[: len(seen) - max(held, default=0)]
    return out, full.replace(MARK, "")[len(out) :], False


def beginnings(text: str) -> list[str]:
    return [text[:k] for k in range(1, len(text))]


def test_random_stop_strings_equal_their_definition(words: Tokenizer) -> None:
    rng = random.Random(7)
    matched = 0
    for _ in range(6000):
        pieces = [rng.choice(["a", "b", "ab", "ba", "aab", "bb", "abc", "<|im_end|>"]) for _ in range(rng.randrange(9))]
        parts = ["a", "b", "ab", "c", "<|im_end|>"]
        stops = [
            "".join(rng.choices(parts, [4, 4, 2, 1, 1], k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))
        ]
        include, min_tokens = rng.random() < 0.5, rng.choice([0, 0, 1, 3])
        text = reply(words, ids_of(words, *pieces), stops=stops, include_stop=include, min_tokens=min_tokens)
        symbols = [piece.replace("<|im_end|>", MARK) for piece in pieces]
        expected = stops_by_definition(symbols, stops, include, min_tokens)
        assert (text.text, text.tail(), text.ending is not None) == expected, (pieces, stops, include, min_tokens)
        matched += text.ending is not None
    assert matched > 2000


def test_work_per_token_does_not_grow_with_the_reply(words: Tokenizer) -> None:
    """Counts what the decoder is asked, not seconds: every token is decoded once, the prompt only at its ends."""
    asked = []
    table = words.pieces
    piece, table.piece = table.piece, lambda token: asked.append(token) or piece(token)
    try:
        text = ReplyText(words, ids_of(words, "ABC") * 5000, stops=["DEFGHX"])
        opened = len(asked)
        text.push(ids_of(words, "DEF") * 5000)
    finally:
        del table.piece
    assert opened < 8
    assert len(asked) - opened == 5000
