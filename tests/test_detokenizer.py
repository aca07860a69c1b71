"""Protects streamed text: it is the text of all tokens together, never holds half a character, ends
before a stop string however the tokens cut it, and holds nothing back longer than it must."""

import codecs
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paged.detokenizer import Detokenizer


class Pieces:
    """A tokenizer whose tokens are given as bytes."""

    def __init__(self, pieces):
        self.pieces = pieces

    def token_bytes(self, token_id):
        return self.pieces[token_id]


def run(pieces, stop=()):
    """What each push gave, what finish gave, and the stop string that was found."""
    detokenizer = Detokenizer(Pieces(pieces), stop)
    pushed = [detokenizer.push(token_id) for token_id in range(len(pieces))]
    return pushed, detokenizer.finish(), detokenizer.matched


def cut(data, places):
    """The bytes of data in pieces, cut at places."""
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def first_stop(text, stops):
    """The specification: read character by character until some stop string is complete."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[:end - len(longest)], longest
    return text, None


TEXT = st.text(alphabet="ab.\n é日🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="ab.é🙂", min_size=1, max_size=5), max_size=3)
PLACES = st.lists(st.integers(0, 100), max_size=12)


def test_a_character_waits_until_it_is_whole():
    smile = "🙂".encode()
    assert run([b"a", smile[:1], smile[1:3], smile[3:] + b"b"]) == (["a", "", "", "🙂b"], "", None)


def test_bytes_that_never_become_a_character():
    assert run([b"a", b"\xff", b"b"]) == (["a", "\ufffd", "b"], "", None)
    assert run([b"a", "é".encode()[:1]]) == (["a", ""], "\ufffd", None)


def test_a_replacement_character_that_the_model_wrote_does_not_wait():
    assert run(["\ufffd".encode(), b"a"]) == (["\ufffd", "a"], "", None)


def test_a_stop_string_inside_one_token_and_across_several():
    assert run([b"one STOP two"], ["STOP"]) == (["one "], "", "STOP")
    assert run([b"one S", b"TO", b"P two"], ["STOP"]) == (["one ", "", ""], "", "STOP")


def test_what_could_begin_a_stop_string_is_let_go_when_it_does_not():
    assert run([b"\n", b"\n", b"x", b"\n"], ["\n\n\n"]) == (["", "", "\n\nx", ""], "\n", None)


def test_a_beginning_inside_a_failed_beginning():
    assert run([b"aa", b"ab", b"c"], ["aab"]) == (["", "a", ""], "", "aab")


def test_nothing_follows_a_stop_string():
    detokenizer = Detokenizer(Pieces([b"a.", b"b"]), ["."])
    assert [detokenizer.push(0), detokenizer.push(1), detokenizer.finish()] == ["a", "", ""]


def test_the_stop_string_that_is_complete_first_wins():
    assert run([b"abc"], ["abc", "b"]) == (["a"], "", "b")
    assert run([b"abc"], ["c", "bc"]) == (["a"], "", "bc")


def test_a_stop_string_in_bytes_that_were_never_whole():
    assert run([b"ab\xf0"], ["\ufffd"]) == (["ab"], "", "\ufffd")


@given(TEXT, PLACES)
def test_the_pieces_make_the_text(text, places):
    pushed, rest, _ = run(cut(text.encode(), places))
    assert "".join(pushed) + rest == text and rest == ""


@given(st.lists(st.binary(max_size=4), max_size=12))
def test_any_bytes_make_the_text_that_decoding_them_at_once_makes(pieces):
    pushed, rest, _ = run(pieces)
    assert "".join(pushed) + rest == b"".join(pieces).decode("utf-8", "replace")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece, text in zip(pieces, pushed, strict=True):
        assert text == decoder.decode(piece)  # at once, not a token late


@given(TEXT, STOPS, PLACES)
def test_stop_strings_do_not_depend_on_where_tokens_end(text, stops, places):
    pushed, rest, matched = run(cut(text.encode(), places), stops)
    assert ("".join(pushed) + rest, matched) == first_stop(text, stops)


@given(TEXT, STOPS, PLACES)
def test_only_what_could_begin_a_stop_string_is_held_back(text, stops, places):
    pieces = cut(text.encode(), places)
    detokenizer, out, seen = Detokenizer(Pieces(pieces), stops), "", b""
    for token_id, piece in enumerate(pieces):
        out += detokenizer.push(token_id)
        seen += piece
        if detokenizer.matched is not None:
            break
        held = seen.decode("utf-8", "ignore").removeprefix(out)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_the_cost_of_a_token_does_not_grow():
    detokenizer = Detokenizer(Pieces([b"ab"]), ["abc"])
    for _ in range(1000):
        detokenizer.push(0)
    assert len(detokenizer._held) == 2
