"""Streams of every style of tokenizer equal the library's decoding of the whole, character for character."""

import random
import time
from collections.abc import Sequence

import pytest
import tokenizers

from tests.worker import text_fixtures as fixtures
from tests.worker.styles import LINES, STYLES, library_text, style
from worker.pieces import TextDecoder
from worker.text import ReplyText
from worker.tokenizer import Tokenizer

LISTS = 20_800  # in all, in the long test
SHORT = 50  # of each style
CHARACTERS = [text.encode() for text in ("é", "漢", "😀", "\ufffd", "e\u0301", "👩‍👧", " ", "\u00a0", "\x00")]


def random_ids(backend: tokenizers.Tokenizer, rng: random.Random) -> list[int]:
    """Any ids, real text, and characters byte by byte, some of them cut; some ids that no tokenizer has."""
    ids: list[int] = []
    size = backend.get_vocab_size()
    for _ in range(rng.randrange(12)):
        kind = rng.random()
        if kind < 0.4:
            ids += rng.choices(range(size + 1), k=rng.randrange(1, 4))
        elif kind < 0.6:
            line = rng.choice(LINES)
            start = rng.randrange(len(line))
            ids += backend.encode(line[start : start + rng.randrange(1, 12)], add_special_tokens=False).ids
        else:
            ids += byte_ids(backend, rng.choice(CHARACTERS)[: rng.choice([1, 2, 3, 4, 99])])
    return ids


def byte_ids(backend: tokenizers.Tokenizer, data: bytes) -> list[int]:
    spellings = [(f"<0x{byte:02X}>", fixtures.BYTE_SPELLING[byte]) for byte in data]
    found = [backend.token_to_id(name) or backend.token_to_id(character) for name, character in spellings]
    return [token for token in found if token is not None]


def taken_off(whole: str, prompt: str) -> str:
    """The prompt's text taken off, as far as it is still there: the reply may complete the prompt's last character."""
    same = next((i for i, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
    return whole[same:]


def check(tokenizer: Tokenizer, backend: tokenizers.Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> None:
    reply = ReplyText(tokenizer, prompt)
    published = ""
    for count, token in enumerate(output, 1):
        reply.push([token])
        published += reply.between(count - 1, count)
    whole, base = library_text(backend, [*prompt, *output], True), library_text(backend, prompt, True)
    assert published + reply.tail() == taken_off(whole, base), (prompt, output)
    assert tokenizer.decode(output) == library_text(backend, output, True), output
    assert tokenizer.decode(output, skip_special=False) == library_text(backend, output, False), output
    decoder = TextDecoder(tokenizer.pieces, prompt, skip_special=False)
    shown = "".join([decoder.push(token) for token in output]) + decoder.flush()
    whole, base = library_text(backend, [*prompt, *output], False), library_text(backend, prompt, False)
    assert shown == taken_off(whole, base), (prompt, output)


def check_many(name: str, count: int) -> None:
    backend, rng = style(name), random.Random(f"{name} {count}")
    tokenizer = fixtures.loaded(backend)
    for _ in range(count):
        check(tokenizer, backend, random_ids(backend, rng), random_ids(backend, rng))


@pytest.mark.parametrize("name", STYLES)
def test_streams_of_a_style_equal_the_library(name: str) -> None:
    check_many(name, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_streams_of_a_style_equal_the_library_in_twenty_thousand_lists(name: str) -> None:
    check_many(name, LISTS // len(STYLES))


@pytest.mark.parametrize("name", STYLES)
def test_texts_of_a_style_come_back_as_the_library_brings_them(name: str) -> None:
    backend = style(name)
    tokenizer = fixtures.loaded(backend)
    for line in LINES:
        ids = tokenizer.encode(line)
        assert ids == backend.encode(line).ids
        check(tokenizer, backend, [], ids)
        check(tokenizer, backend, ids[: len(ids) // 2], ids[len(ids) // 2 :])


HARD = ["a", " ", "\n", "7", "!", "a1! \n", "aB", "😀", "\u0301", "\u00a0", "<", "<|", " \r", "'s", "漢a"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_hard_texts_of_a_style_cost_their_length(name: str) -> None:
    """One word without an end, runs of spaces: four times the text, and far from sixteen times the time."""
    tokenizer = fixtures.loaded(style(name))

    def seconds(text: str) -> float:
        began = time.process_time()
        tokenizer.encode(text)
        return time.process_time() - began

    for part in HARD:
        short, long = (seconds(part * (size // len(part)) + "x") for size in (50_000, 200_000))
        assert long < 10 * max(short, 0.02), part


def test_streams_of_the_demo_model_equal_the_library() -> None:
    tokenizer, rng = fixtures.smollm2(), random.Random(3)
    for _ in range(200):
        check(tokenizer, tokenizer._backend, *(random_ids(tokenizer._backend, rng) for _ in range(2)))
