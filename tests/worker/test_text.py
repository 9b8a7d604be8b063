"""Published text: what leaves, when, and where a reply ends. Each rule is checked against its definition."""

import pytest

from tests.worker import text_fixtures as fixtures
from tests.worker.text_fixtures import ids_of, reply
from worker.text import Ending, ReplyText
from worker.tokenizer import Tokenizer

END = 2  # <|im_end|> in the byte-level vocabulary


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    known = ["ABC", "DEF", "GH", "X", "abc", "x y", " z w", "injury", "Hello", " world", "ab", "ba", "aab", "bb"]
    return fixtures.loaded(
        fixtures.byte_level_backend(known), eos_token="<|im_end|>", clean_up_tokenization_spaces=True
    )


def bytes_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return ids_of(tokenizer, *(bytes([byte]) for byte in text.encode()))


class TestWholeCharacters:
    def test_characters_spread_over_tokens_leave_when_they_are_whole(self, words: Tokenizer) -> None:
        text = ReplyText(words, [])
        seen = []
        for token in [*bytes_of(words, "😀"), *bytes_of(words, "漢"), *bytes_of(words, "a")]:
            text.push([token])
            seen.append(text.text)
        assert seen == ["", "", "", "😀", "😀", "😀", "😀漢", "😀漢a"]
        assert text.offsets == [0, 0, 0, 1, 1, 1, 2, 3]
        assert text.tail() == ""

    def test_an_unfinished_character_at_the_end_is_one_replacement(self, words: Tokenizer) -> None:
        text = reply(words, [*ids_of(words, "abc"), *bytes_of(words, "😀")[:3]])
        assert (text.text, text.tail()) == ("abc", "\ufffd")

    def test_a_broken_character_leaves_as_soon_as_it_is_known_to_be_broken(self, words: Tokenizer) -> None:
        text = reply(words, [*bytes_of(words, "漢")[:2], *bytes_of(words, "a")])
        assert (text.text, text.offsets) == ("\ufffda", [0, 0, 2])

    def test_a_character_that_the_prompt_began_belongs_to_the_reply(self, words: Tokenizer) -> None:
        first, *rest = bytes_of(words, "漢")
        text = reply(words, [*rest, *ids_of(words, "X")], prompt=[*ids_of(words, "abc"), first])
        assert text.text == "漢X"

    def test_a_character_that_the_prompt_left_broken_is_the_prompts(self, words: Tokenizer) -> None:
        text = reply(words, ids_of(words, "X"), prompt=bytes_of(words, "漢")[:2])
        assert (text.text, text.tail()) == ("X", "")

    def test_control_tokens_between_the_bytes_of_a_character_do_not_break_it(self, words: Tokenizer) -> None:
        one, two, three = bytes_of(words, "漢")
        assert reply(words, [one, 1, two, 2, three]).text == "漢"

    def test_ids_beyond_the_tokenizer_have_no_text(self, words: Tokenizer) -> None:
        text = reply(words, [*ids_of(words, "ab"), 5000, *ids_of(words, "ba")])
        assert (text.text, text.offsets) == ("abba", [2, 2, 4])


class TestSpaces:
    def test_metaspace_words_keep_their_spaces(self) -> None:
        tokenizer = fixtures.loaded(fixtures.metaspace_backend())
        ids = [tokenizer._backend.token_to_id(piece) for piece in ("\u2581Hello", "\u2581world", "\u2581again")]
        assert reply(tokenizer, ids).text == "Hello world again"
        assert reply(tokenizer, ids, prompt=[1, ids[0]]).text == " Hello world again"

    def test_a_lone_space_that_begins_a_text_is_dropped_once(self) -> None:
        tokenizer = fixtures.loaded(fixtures.metaspace_backend())
        space, hello = (tokenizer._backend.token_to_id(piece) for piece in ("\u2581", "\u2581Hello"))
        assert reply(tokenizer, [space, hello]).text == " Hello"

    @pytest.mark.parametrize("switch", [{"clean_up_tokenization_spaces": s} for s in (True, False)] + [{}])
    def test_nothing_is_cleaned_up(self, switch: dict[str, bool]) -> None:
        tokenizer = fixtures.loaded(fixtures.byte_level_backend(["a", " n", "'t"]), **switch)
        ids = ids_of(tokenizer, "a", " ", ".", " n", "'t")
        text = reply(tokenizer, ids)
        assert text.text == "a . n't" == tokenizer.decode(ids)
        assert text.offsets == [1, 2, 3, 5, 7]


class TestStopStrings:
    def test_what_may_begin_a_stop_is_held_back(self, words: Tokenizer) -> None:
        text = ReplyText(words, [], stops=["DEFGH"])
        assert text.push(ids_of(words, "ABC", "DEF")) is None
        assert (text.text, text.tail()) == ("ABC", "DEF")
        assert text.push(ids_of(words, "GH")) == Ending("stop", "DEFGH")
        assert (text.text, text.tail(), text.offsets) == ("ABC", "", [3, 3, 3])

    def test_what_turns_out_to_be_no_stop_leaves(self, words: Tokenizer) -> None:
        text = reply(words, ids_of(words, "DEF", "X"), stops=["DEFGH"])
        assert (text.text, text.offsets, text.ending) == ("DEFX", [0, 4], None)

    @pytest.mark.parametrize(("include", "shown"), [(False, "a"), (True, "ab")])
    def test_a_stop_inside_a_token(self, words: Tokenizer, include: bool, shown: str) -> None:
        text = reply(words, ids_of(words, "abc", "X"), stops=["b"], include_stop=include)
        assert (text.text, text.tail(), text.ending) == (shown, "", Ending("stop", "b"))
        assert text.ids == ids_of(words, "abc")

    @pytest.mark.parametrize(("include", "shown"), [(False, "x "), (True, "x y z")])
    def test_a_stop_from_the_middle_of_one_token_to_the_middle_of_the_next(
        self, words: Tokenizer, include: bool, shown: str
    ) -> None:
        text = reply(words, ids_of(words, "x y", " z w"), stops=["y z"], include_stop=include)
        assert (text.text, text.ending) == (shown, Ending("stop", "y z"))

    def test_the_first_stop_to_be_complete_wins_and_of_two_the_longer(self, words: Tokenizer) -> None:
        assert reply(words, ids_of(words, "abc"), stops=["abcd", "bc", "c"]).ending == Ending("stop", "bc")
        text = reply(words, ids_of(words, "abc"), stops=["abc", "b"])
        assert (text.text, text.ending) == ("a", Ending("stop", "b"))

    def test_a_stop_that_overlaps_itself(self, words: Tokenizer) -> None:
        text = reply(words, ids_of(words, "ab", "aab", "ab"), stops=["abaaba"])
        assert (text.text, text.ending) == ("", Ending("stop", "abaaba"))

    def test_a_stop_in_a_character_of_several_tokens(self, words: Tokenizer) -> None:
        text = reply(words, [*ids_of(words, "ab"), *bytes_of(words, "漢字")], stops=["漢字"])
        assert (text.text, text.ending) == ("ab", Ending("stop", "漢字"))

    def test_what_was_held_belongs_to_a_reply_that_ends_otherwise(self, words: Tokenizer) -> None:
        text = reply(words, [*ids_of(words, "ABC", "DEF"), END], stops=["DEFGH"], end_ids=frozenset({END}))
        assert (text.text, text.tail(), text.ending) == ("ABC", "DEF", Ending("stop", None))

    def test_a_stop_counts_when_it_is_complete_after_min_tokens(self, words: Tokenizer) -> None:
        ids = ids_of(words, "ab", "ab", "ab")
        text = reply(words, ids, stops=["ab"], min_tokens=2)
        assert (text.text, text.ids, text.ending) == ("abab", ids, Ending("stop", "ab"))
        across = reply(words, ids_of(words, "X", "DEF", "GH"), stops=["DEFGH"], min_tokens=2)
        assert (across.text, across.ending) == ("X", Ending("stop", "DEFGH"))

    def test_the_prompt_is_no_part_of_a_stop(self, words: Tokenizer) -> None:
        text = reply(words, ids_of(words, "GH"), prompt=ids_of(words, "DEF"), stops=["DEFGH"])
        assert (text.text, text.ending) == ("GH", None)


class TestControlTokensAsStops:
    def test_a_control_token_as_stop_string_ends_the_reply_unseen(self, words: Tokenizer) -> None:
        for include in (False, True):
            text = reply(words, [*ids_of(words, "injury"), END], stops=["<|im_end|>"], include_stop=include)
            assert (text.text, text.tail(), text.ending) == ("injury", "", Ending("stop", "<|im_end|>"))
            assert text.ids[-1] == END

    def test_a_control_token_as_stop_id_takes_no_text_with_it(self, words: Tokenizer) -> None:
        text = reply(words, [*ids_of(words, "injury"), END], stop_ids=frozenset({END}))
        assert (text.text, text.tail(), text.ending) == ("injury", "", Ending("stop", END))

    def test_its_name_is_reported_also_where_it_ends_the_sequence(self, words: Tokenizer) -> None:
        text = reply(words, [END], stops=["<|im_end|>"], end_ids=frozenset({END}))
        assert text.ending == Ending("stop", "<|im_end|>")

    def test_it_matches_where_the_model_spells_it_out(self, words: Tokenizer) -> None:
        text = reply(words, [*ids_of(words, "X"), *bytes_of(words, "<|im_end|>")], stops=["<|im_end|>"])
        assert (text.text, text.ending) == ("X", Ending("stop", "<|im_end|>"))

    def test_a_stop_of_text_and_control_tokens(self, words: Tokenizer) -> None:
        text = ReplyText(words, [], stops=["DEF<|im_end|>GH"])
        text.push([*ids_of(words, "ABC", "DEF"), END])
        assert (text.text, text.tail()) == ("ABC", "DEF")
        assert text.push(ids_of(words, "GH", "X")) == Ending("stop", "DEF<|im_end|>GH")
        assert text.text == "ABC"

    def test_a_stop_is_seen_across_a_hidden_control_token(self, words: Tokenizer) -> None:
        text = reply(words, [*ids_of(words, "ABC", "DEF"), 1, *ids_of(words, "GH")], stops=["DEFGH"])
        assert (text.text, text.ending) == ("ABC", Ending("stop", "DEFGH"))


class TestEnds:
    def test_an_end_of_sequence_in_a_list_of_them(self, words: Tokenizer) -> None:
        ends = frozenset({END, *ids_of(words, "GH")})
        text = ReplyText(words, [], end_ids=ends)
        assert text.push(ids_of(words, "ABC", "GH", "X")) == Ending("stop", None)
        assert (text.text, text.tail(), text.ids) == ("ABC", "", ids_of(words, "ABC", "GH"))

    def test_a_stop_id_is_shown_only_where_that_was_asked_for(self, words: Tokenizer) -> None:
        (stop,) = ids_of(words, "GH")
        for include, shown in ((False, "ABC"), (True, "ABCGH")):
            text = reply(words, ids_of(words, "ABC", "GH"), stop_ids=frozenset({stop}), include_stop=include)
            assert (text.text + text.tail(), text.ending) == (shown, Ending("stop", stop))

    def test_nothing_is_appended_after_the_end(self, words: Tokenizer) -> None:
        text = ReplyText(words, [], max_tokens=2)
        assert text.push(ids_of(words, "ABC", "DEF", "GH")) == Ending("length", None)
        assert text.push(ids_of(words, "X")) == Ending("length", None)
        assert (text.text, text.ids) == ("ABCDEF", ids_of(words, "ABC", "DEF"))

    def test_a_stop_at_the_last_token_is_a_stop(self, words: Tokenizer) -> None:
        assert reply(words, ids_of(words, "ab"), stops=["b"], max_tokens=1).ending == Ending("stop", "b")
        assert reply(words, [END], end_ids=frozenset({END}), max_tokens=1).ending == Ending("stop", None)

    def test_ids_do_not_end_a_reply_before_min_tokens(self, words: Tokenizer) -> None:
        text = ReplyText(words, [], stop_ids=frozenset({END}), min_tokens=1)
        assert text.push([END]) is None
        assert text.push([END]) == Ending("stop", END)

    def test_a_held_character_is_given_when_the_length_ends_the_reply(self, words: Tokenizer) -> None:
        text = reply(words, bytes_of(words, "漢"), max_tokens=2)
        assert (text.text, text.tail(), text.ending) == ("", "\ufffd", Ending("length", None))

    def test_the_workers_room_ends_a_reply_but_keeps_what_was_published(self, words: Tokenizer) -> None:
        ids = ids_of(words, "ABC", "DEF", "GH", "X")
        text = ReplyText(words, [], room=3)
        assert text.push(ids[:2]) is None
        assert text.push(ids[2:3]) == Ending("length", None)
        published = reply(words, ids, room=3)
        assert (published.ids, published.ending) == (ids, Ending("length", None))
        assert reply(words, ids, room=3, stops=["X"]).ending == Ending("stop", "X")

    def test_pushing_nothing_ends_nothing(self, words: Tokenizer) -> None:
        assert ReplyText(words, [], max_tokens=0).push([]) is None

    def test_between_gives_the_text_of_a_range_of_tokens(self, words: Tokenizer) -> None:
        text = reply(words, ids_of(words, "ABC", "DEF", "X", "GH"), stops=["DEFGH"])
        assert (text.between(0, 2), text.between(2, 4), text.at(0), text.at(2)) == ("ABC", "DEFXGH", 0, 3)
