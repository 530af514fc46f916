"""Client stop strings: text before the first one comes out, nothing after it does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnloom.parse.stops import StopTrimmer


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    trimmer = StopTrimmer(stops)
    text = "".join(trimmer.feed(piece) for piece in pieces) + trimmer.finish()
    return text, trimmer.matched


def test_no_stop_strings_pass_everything_through() -> None:
    assert run(["a", "b\n"], []) == ("ab\n", None)
    assert run(["ab"], [""]) == ("ab", None)


def test_stop_split_across_pieces_ends_the_text() -> None:
    assert run(["abST", "OP", "more"], ["STOP"]) == ("ab", "STOP")


def test_start_of_a_stop_that_never_comes_is_text() -> None:
    assert run(["abST", "O"], ["STOP"]) == ("abSTO", None)


def test_only_a_possible_stop_is_held_back() -> None:
    trimmer = StopTrimmer(["STOP"])
    assert [trimmer.feed("ab"), trimmer.feed("S"), trimmer.feed("x")] == ["ab", "", "Sx"]


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [(["b", "bc"], "a", "b"), (["c", "b"], "a", "b"), (["abcd", "c"], "ab", "c"), (["c", "bc"], "a", "bc")],
)
def test_first_stop_to_be_complete_wins_and_the_longer_of_two_that_end_together(stops: list[str], text: str, matched: str) -> None:
    assert run(["abcd"], stops) == (text, matched)
    assert run(list("abcd"), stops) == (text, matched)


@settings(deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_first_stop_however_it_is_cut(text: str, stops: list[str]) -> None:
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    expected = text[: min(found)[1]] if found else text
    assert run([text], stops)[0] == expected
    assert run(list(text), stops)[0] == expected
