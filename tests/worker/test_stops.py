"""Stop strings of every shape, and what is held back for them: exactly as much as needed, and never lost."""

import random
import time
from collections.abc import Sequence

import pytest

from tests.worker import text_fixtures as fixtures
from tests.worker.text_fixtures import ids_of, reply
from worker.text import Ending, ReplyText
from worker.tokenizer import Tokenizer

END = 2  # <|im_end|>
STOP_ID = 3  # the byte 0, which no text here has


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return fixtures.loaded(
        fixtures.byte_level_backend(["ab", "abab", "é漢", "漢a", " stop", "STOP", "e\u0301", "\ufffd"])
    )


def bytes_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return ids_of(tokenizer, *(bytes([byte]) for byte in text.encode()))


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["a"], ["a"], "", "a"),  # the first character
        (["ab", "abab"], ["ababab"], "", "ababab"),  # the whole text
        (["ab"], ["abab", "ab"], "", "ab"),  # one begins another: the shorter is complete first
        (["abab"], ["bab", "ba"], "a", "ba"),  # the earliest end, wherever each begins
        (["ab"], ["b", "ab"], "", "ab"),  # of those that end together the longest is cut
        (["ab", "abab", "c"], ["abac", "babc"], "aba", "babc"),  # a beginning that fails inside another
        (["e\u0301"], ["e"], "", "e"),  # stops are characters, not what a reader sees as one
        (["e\u0301", "a"], ["\u0301a"], "e", "\u0301a"),
        (["é漢", "a"], ["漢a"], "é", "漢a"),
        ([*"STO", "STOP"], ["STOP"], "STO", "STOP"),
        ([" stop"], ["stop"], " ", "stop"),
        (["a", "\x00", "b"], ["a\x00b"], "", "a\x00b"),
        (["\ufffd"], ["\ufffd"], "", "\ufffd"),
        (["a"] * 300, ["a" * 256], "", "a" * 256),
    ],
)
def test_the_earliest_end_wins(words: Tokenizer, pieces: list[str], stops: list[str], text: str, stop: str) -> None:
    for ids in (ids_of(words, *pieces), bytes_of(words, "".join(pieces))):
        for given in (stops, stops[::-1]):
            found = reply(words, ids, stops=given)
            assert (found.text, found.tail(), found.ending) == (text, "", Ending("stop", stop))
            shown = reply(words, ids, stops=given, include_stop=True)
            assert (shown.text, shown.tail(), shown.ending) == (text + stop, "", Ending("stop", stop))


def test_a_stop_of_control_tokens_too_is_cut_where_it_is_the_longer(words: Tokenizer) -> None:
    ids = [*ids_of(words, "a", "ab"), END, *ids_of(words, "STOP")]
    for stops in (["STOP", "b<|im_end|>STOP"], ["b<|im_end|>STOP", "STOP"]):
        found = reply(words, ids, stops=stops)
        assert (found.text, found.ending) == ("aa", Ending("stop", "b<|im_end|>STOP"))
    found = reply(words, ids, stops=["bSTOP", "<|im_end|>STOP"])
    assert (found.text, found.ending) == ("aa", Ending("stop", "bSTOP"))


def test_a_broken_character_can_be_part_of_a_stop(words: Tokenizer) -> None:
    ids = [*ids_of(words, "ab"), *bytes_of(words, "漢")[:2], *ids_of(words, "a", "b")]
    found = reply(words, ids, stops=["\ufffda"])
    assert (found.text, found.ending) == ("ab", Ending("stop", "\ufffda"))


def held_by_definition(text: str, stops: Sequence[str]) -> int:
    """The longest end of a text that begins a stop string without being one."""
    return max((k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])), default=0)


def cut_by_definition(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string to be complete begins, the longest where several end together."""
    ends = (end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops))
    end = next(ends, None)
    return None if end is None else end - max(len(stop) for stop in stops if text[:end].endswith(stop))


def whole(data: bytes) -> str:
    """The characters of an output that are whole."""
    return data.decode("utf-8", "ignore")


def test_no_more_is_held_than_may_begin_a_stop_after_any_byte(words: Tokenizer) -> None:
    rng, ended = random.Random(5), 0
    for _ in range(1500):
        alphabet = rng.choice(["ab", "aé", "漢é", "e\u0301", "ab漢"])
        stops = ["".join(rng.choices(alphabet, k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 5))]
        output, text = "".join(rng.choices(alphabet, k=12)).encode(), ReplyText(words, [], stops=stops)
        for count, token in enumerate(bytes_of(words, output.decode()), 1):
            text.push([token])
            seen = whole(output[:count])
            cut = cut_by_definition(seen, stops)
            if cut is not None:
                assert (text.text, text.tail()) == (seen[:cut], "")
                assert text.ending is not None
                ended += 1
                break
            held = held_by_definition(seen, stops)
            assert text.text == seen[: len(seen) - held], (stops, seen)
            broken = output[:count].decode("utf-8", "replace")
            assert text.text + text.tail() == broken, "whatever ends the reply here, nothing is lost"
    assert 500 < ended < 1400


@pytest.mark.parametrize(
    ("options", "last"),
    [({"max_tokens": 3}, []), ({"stop_ids": frozenset({STOP_ID})}, [STOP_ID]), ({"end_ids": frozenset({END})}, [END])],
)
def test_what_is_held_is_given_at_every_other_end(words: Tokenizer, options: dict, last: list[int]) -> None:
    ids = [*ids_of(words, "ab"), *bytes_of(words, "漢")[:2], *last]
    text = reply(words, ids, stops=["abc", "b漢"], **options)
    assert text.ending is not None
    assert (text.text, text.tail()) == ("", "ab\ufffd")
    assert (text.text, text.tail()) == ("", "ab\ufffd"), "asking changes nothing"


def test_stops_before_min_tokens_are_text(words: Tokenizer) -> None:
    for minimum in range(6):
        text = reply(words, ids_of(words, *"abcabcabc"), stops=["bc"], min_tokens=minimum)
        ends = [end for end in (3, 6, 9) if end > minimum]
        assert (len(text.ids), text.text) == (ends[0], ("abc" * 3)[: ends[0] - 2])


@pytest.mark.parametrize("kind", ["plain", "one byte of an emoji", "held back", "hidden"])
def test_a_long_reply_costs_its_length(words: Tokenizer, kind: str) -> None:
    """Ten times the tokens, some ten times the time: far from the hundred times of work that looks back at it all."""
    token = {"plain": ids_of(words, "ab")[0], "one byte of an emoji": bytes_of(words, "😀")[0], "hidden": 1}
    token["held back"] = ids_of(words, "a")[0]

    def seconds(count: int) -> float:
        text = ReplyText(words, [], stops=["a" * 255 + "b"] if kind == "held back" else ["xyz"])
        began = time.process_time()
        for i in range(count):
            text.push([token[kind]])
            text.between(i, i + 1)
        text.tail()
        return time.process_time() - began

    assert seconds(30_000) < 30 * max(min(seconds(3_000) for _ in range(3)), 0.001)
