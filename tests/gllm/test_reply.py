"""The bookkeeping of a reply, without a server."""

import random
import tracemalloc

import pytest

from gllm.protocol import TERMINAL_ENTRY_ID, Done, Error, Resume, Start, Timings, TokenLogprob, Tokens, Usage
from gllm.reply import Assembly, Cursor, Hole, JobFailed, Reply, ReplyError, Rewound, read_entry

WORDS = ["Hel", "lo", " wö", "rld", "", "🙂", "!", " é", "", "n", "d"]
START = Start(worker="w", attempt=1, numerics="x", prompt_tokens=3, cached_tokens=0)


def tokens(first: int, count: int, words: list[str] = WORDS) -> Tokens:
    at = len("".join(words[:first]))
    ids = list(range(100 + first, 100 + first + count))
    return Tokens(first=first, at=at, ids=ids, text="".join(words[first : first + count]))


def done(n: int, text: str = "") -> Done:
    usage = Usage(prompt_tokens=3, completion_tokens=n)
    return Done(finish_reason="stop", stop=None, text=text, usage=usage, timings=Timings())


def take(cursor: Cursor, event: Tokens) -> Reply | None:
    return cursor.take(f"{event.first + len(event.ids)}-0", event)


def test_cursor_passes_on_a_plain_reply() -> None:
    cursor = Cursor()
    replies = [
        cursor.take("0-1", START),
        take(cursor, tokens(0, 2)),
        take(cursor, tokens(2, 3)),
        cursor.take(TERMINAL_ENTRY_ID, done(5, "tail")),
    ]
    assert [reply.text for reply in replies if reply] == ["", "Hello", " wörld", "tail"]
    assert [(reply.n, reply.characters) for reply in replies if reply] == [(0, 0), (2, 5), (5, 11), (5, 15)]
    assert cursor.ended


def test_cursor_drops_what_a_repair_repeats() -> None:
    cursor = Cursor()
    take(cursor, tokens(0, 4))
    reply = take(cursor, tokens(2, 5))
    assert reply is not None
    assert reply.event == tokens(4, 3)
    assert take(cursor, tokens(0, 7)) is None


def test_cursor_cuts_logprobs_with_their_tokens() -> None:
    cursor = Cursor()
    take(cursor, tokens(0, 2))
    listed = [TokenLogprob(id=100 + i, logprob=-float(i)) for i in range(4)]
    again = Tokens(first=0, at=0, ids=[100, 101, 102, 103], text="Hello wörld", logprobs=listed, prompt_logprobs=[None])
    reply = cursor.take("4-0", again)
    assert reply is not None
    assert isinstance(reply.event, Tokens)
    assert reply.event.logprobs == listed[2:]
    assert reply.event.prompt_logprobs is None


def test_cursor_raises_rewound_when_known_ids_differ() -> None:
    cursor = Cursor()
    take(cursor, tokens(0, 4))
    other = Tokens(first=2, at=5, ids=[102, 999, 104], text=" wxyz")
    with pytest.raises(Rewound, match=r"entry 5-0: token 3 was 103 and is now 999"):
        take(cursor, other)


def test_cursor_raises_hole_when_tokens_are_missing() -> None:
    cursor = Cursor()
    take(cursor, tokens(0, 2))
    with pytest.raises(Hole, match="tokens 2 to 4"):
        take(cursor, tokens(4, 1))


def test_cursor_raises_hole_when_characters_are_missing() -> None:
    cursor = Cursor()
    take(cursor, tokens(0, 2))
    with pytest.raises(Hole, match="starts at character 9, the text read ends at 5"):
        take(cursor, Tokens(first=2, at=9, ids=[102], text="x"))


def test_cursor_raises_hole_when_the_end_counts_more_tokens() -> None:
    cursor = Cursor()
    take(cursor, tokens(0, 2))
    with pytest.raises(Hole, match="after 3 tokens, 2 of them"):
        cursor.take(TERMINAL_ENTRY_ID, done(3))


def test_cursor_resumes_and_learns_what_lies_before() -> None:
    cursor = Cursor("4-0")
    assert cursor.take("0-1", START) is None
    assert take(cursor, tokens(0, 2)) is None
    assert take(cursor, tokens(2, 2)) is None
    reply = take(cursor, tokens(4, 3))
    assert reply is not None
    assert (reply.n, reply.characters, reply.text) == (7, len("".join(WORDS[:7])), "".join(WORDS[4:7]))


def test_cursor_resumes_when_the_beginning_is_gone() -> None:
    reply = take(Cursor("4-0"), tokens(4, 3))
    assert reply is not None
    assert reply.text == "".join(WORDS[4:7])


def test_cursor_resumes_inside_a_rewritten_entry_when_it_is_told_the_characters() -> None:
    cursor = Cursor("4-0", characters=len("".join(WORDS[:4])))
    take(cursor, tokens(0, 3))
    reply = take(cursor, tokens(3, 5))
    assert reply is not None
    assert reply.event == tokens(4, 4)


def test_cursor_refuses_to_guess_where_a_rewritten_entry_is_to_be_cut() -> None:
    with pytest.raises(Rewound, match="came again in another entry"):
        take(Cursor("4-0"), tokens(3, 5))


@pytest.mark.parametrize("last_id", ["0-0", "0-1", "4-3", TERMINAL_ENTRY_ID])
def test_cursor_shows_marks_behind_its_place_only(last_id: str) -> None:
    resume = Resume(worker="w", attempt=2, numerics="x", first=4, exact=True)
    cursor = Cursor(last_id)
    shown = [cursor.take("0-1", START), cursor.take("4-3", resume)]
    wanted = {"0-0": [True, True], "0-1": [False, True], "4-3": [False, False], TERMINAL_ENTRY_ID: [False, False]}
    assert [reply is not None for reply in shown] == wanted[last_id]
    assert cursor.ended == (last_id == TERMINAL_ENTRY_ID)


@pytest.mark.parametrize("last_id", ["", "1", "1-", "-1-0", "$", "1-0 ", "٣-0", "x-y"])
def test_cursor_refuses_an_id_that_is_none(last_id: str) -> None:
    with pytest.raises(ValueError, match="last_id: an entry id like 12-0 expected"):
        Cursor(last_id)


@pytest.mark.parametrize("last_id", ["1764461000000-0", "2147483648-0", "18446744073709551615-0"])
def test_cursor_refuses_a_place_beyond_any_reply(last_id: str) -> None:
    """An ordinary Redis id, a time in milliseconds, is easily given by mistake."""
    with pytest.raises(ValueError, match=f"last_id: an entry id of a reply like 12-0 expected, got '{last_id}'"):
        Cursor(last_id)


def test_cursor_takes_memory_for_what_is_in_the_stream_only() -> None:
    tracemalloc.start()
    try:
        cursor = Cursor("2147483647-0")
        assert take(cursor, tokens(0, 4)) is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_cursor_raises_rewound_when_the_reply_ends_before_its_place() -> None:
    cursor = Cursor("7-0")
    take(cursor, tokens(0, 4))
    with pytest.raises(Rewound, match="ended after 4 tokens, 7 of it were read before"):
        cursor.take(TERMINAL_ENTRY_ID, done(4))


@pytest.mark.parametrize("seed", range(30))
def test_cursor_gives_each_token_once_whatever_is_repeated(seed: int) -> None:
    """Random entries, repairs, rereads from the start and changes of reader: text and ids come out whole."""
    rng = random.Random(seed)
    words = [rng.choice(WORDS) for _ in range(40)]
    cursor, replies, written, n = Cursor(), [], [], 0
    while n < len(words):
        first = max(0, n - rng.choice((0, 0, 0, 1, 3, 20)))
        event = tokens(first, min(len(words), n + rng.randint(1, 6)) - first, words)
        n = event.first + len(event.ids)
        written.append((f"{n}-0", event))
        pick = rng.random()
        if pick < 0.2 and replies:
            cursor = Cursor(replies[-1].entry, replies[-1].characters)
        again = written if pick < 0.4 else written[-1:]
        replies += [reply for entry, old in again if (reply := cursor.take(entry, old))]
    assert "".join(reply.text for reply in replies) == "".join(words)
    assert [token for reply in replies for token in reply.ids] == [100 + i for i in range(len(words))]


def test_assembly_puts_a_result_together() -> None:
    assembly, cursor = Assembly("j"), Cursor()
    scores = [TokenLogprob(id=1, logprob=-0.5)]
    parts = [
        ("0-1", START),
        ("1-0", Tokens(first=0, at=0, ids=[1], text="a", logprobs=scores, prompt_logprobs=[None])),
        ("2-0", Tokens(first=1, at=1, ids=[2], text="b", logprobs=scores)),
        (TERMINAL_ENTRY_ID, done(2, "c")),
    ]
    for entry, event in parts:
        reply = cursor.take(entry, event)
        assert reply is not None
        assembly.add(reply)
    result = assembly.result()
    assert (result.text, result.ids, result.finish_reason) == ("abc", [1, 2], "stop")
    assert (result.logprobs, result.prompt_logprobs, result.usage.prompt_tokens) == (scores * 2, [None], 3)


def test_assembly_raises_what_the_error_event_says() -> None:
    error = Error(code="internal", message="nan", retryable=True)
    with pytest.raises(JobFailed, match="job j: internal: nan") as caught:
        Assembly("j").add(Reply(TERMINAL_ENTRY_ID, error, 0, 0))
    assert (caught.value.code, caught.value.message, caught.value.retryable) == ("internal", "nan", True)


@pytest.mark.parametrize("fields", [{}, {b"d": b"{"}, {b"d": b'{"type":"surprise"}'}, {b"d": b"\xff"}])
def test_entries_that_are_no_event_are_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(ReplyError, match="entry 7-0: no reply event of protocol version 1"):
        read_entry(b"7-0", fields)
