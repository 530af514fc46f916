"""Where a sampled reply and the template's own ending meet, in texts a person can read: `<x>` is a control token, a letter is a word."""

from __future__ import annotations

import re

import pytest

from turnloom.render.ending import Control, find_ending, missing

IDS = {"<end>": 1, "<eos>": 2, "<user>": 3, "<bot>": 4, "<return>": 5, "<call>": 6, "<section>": 7, "<result>": 8}
ENDS = frozenset({IDS["<end>"], IDS["<eos>"], IDS["<return>"]})
OPENINGS = frozenset({IDS["<bot>"]})


def controls(text: str) -> list[Control]:
    return [Control(m.start(), m.end(), IDS[m.group()]) for m in re.finditer("<[a-z]+>", text)]


def encode(text: str) -> list[int]:
    return [IDS.get(piece, 100 + ord(piece[0])) for piece in re.findall("<[a-z]+>|.|\n", text)]


def decode(tokens: list[int]) -> str:
    spelled = {i: s for s, i in IDS.items()}
    return "".join(spelled.get(t) or chr(t - 100) for t in tokens)


def appended(continued: str, closed: str, sampled: str) -> str | None:
    """What is written after the sampled reply; None where the template cannot be bridged."""
    ending = find_ending(continued, closed, controls, ENDS, OPENINGS)
    if ending is None:
        return None
    rest = encode(continued[ending.at :])
    return decode(rest[missing(ending, encode(sampled), rest, lambda t: t < 100, ENDS) :])


QWEN = ("<end>\n<user>u<end>\n<bot>", "<end>\n")


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ("hi<end>", "\n<user>u<end>\n<bot>"),
        ("hi", "<end>\n<user>u<end>\n<bot>"),
        ("", "<end>\n<user>u<end>\n<bot>"),
        ("hi<eos>", "<end>\n<user>u<end>\n<bot>"),
        ("hi<end>\n", "<user>u<end>\n<bot>"),
        ("hi<end><eos>", "\n<user>u<end>\n<bot>"),
        ("hi<end>x", "<end>\n<user>u<end>\n<bot>"),
        ("hi<end>\nx", "<end>\n<user>u<end>\n<bot>"),
        ("hi<user>", "<end>\n<user>u<end>\n<bot>"),
    ],
    ids=["stop", "length", "nothing", "another end", "past the close", "two ends", "words past the close", "more past it", "an opening"],
)
def test_an_end_token_closes_the_turn_once(sampled: str, expected: str) -> None:
    assert appended(*QWEN, sampled) == expected


@pytest.mark.parametrize(
    ("sampled", "expected"), [("hi<return>", "<user>u<end><bot>"), ("hi<end>", "<user>u<end><bot>"), ("hi", "<end><user>u<end><bot>")]
)
def test_a_token_that_ends_only_the_last_reply_stands_for_the_end(sampled: str, expected: str) -> None:
    """gpt-oss: `<|return|>` when nothing follows, `<|end|>` once something does."""
    assert appended("<end><user>u<end><bot>", "<return>", sampled) == expected


@pytest.mark.parametrize(
    ("sampled", "expected"), [("hi<user>", "u<bot>"), ("hi", "<user>u<bot>"), ("hi<eos>", "<user>u<bot>"), ("hi<result>", "<user>u<bot>")]
)
def test_without_an_end_token_the_next_opening_ends_the_turn(sampled: str, expected: str) -> None:
    """GLM: the reply ends where `<|user|>` or `<|observation|>` begins."""
    assert appended("<user>u<bot>", "", sampled) == expected


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ("<call>x<section><end>", "<user>u<end><bot>"),
        ("<call>x<section>", "<end><user>u<end><bot>"),
        ("<call>x", "<end><user>u<end><bot>"),
        ("<call>x<section>and words", "<end><user>u<end><bot>"),
    ],
)
def test_tokens_that_close_the_calls_are_not_written_twice(sampled: str, expected: str) -> None:
    """Kimi and DeepSeek: a section of calls closes with its own token before the turn's end."""
    assert appended("y<section><end><user>u<end><bot>", "y<section><end>", sampled) == expected


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ("<call>x<section><result>", "r<section>"),
        ("<call>x<section>", "<result>r<section>"),
        ("<call>x<section><end>", "<result>r<section>"),
    ],
    ids=["stopped at the result", "stopped before it", "ended the turn"],
)
def test_a_result_inside_the_models_turn_goes_on_after_the_call(sampled: str, expected: str) -> None:
    """Gemma 4: `<|tool_response>` follows the call in the same turn, and is itself what the model stops at."""
    ends = ENDS | {IDS["<result>"]}
    ending = find_ending("y<section><result>r<section>", "y<section><result>", controls, ends, OPENINGS)
    assert ending is not None
    rest = encode("y<section><result>r<section>"[ending.at :])
    assert decode(rest[missing(ending, encode(sampled), rest, lambda t: t < 100, ends) :]) == expected


@pytest.mark.parametrize(
    ("continued", "closed"),
    [("<user>u<end>", "<end>"), ("!<end><user>u", "<end>"), ("<bot><user>u", "<end>"), ("zu", "y")],
    ids=["closes only the last", "closes otherwise", "an opening is no end", "other words"],
)
def test_a_template_that_ends_a_reply_differently_is_not_bridged(continued: str, closed: str) -> None:
    assert appended(continued, closed, "hi<end>") is None


@pytest.mark.parametrize(
    ("said", "calls", "expected"),
    [
        ("hi", False, "#end\nU:u\nB:"),
        ("hi#end", False, "\nU:u\nB:"),
        ("hi#e", False, "nd\nU:u\nB:"),
        ("hi#end\n", False, "U:u\nB:"),
        ("hi#end\nU:", False, "u\nB:"),
        ("", False, "#end\nU:u\nB:"),
        ("a call", True, "\nU:u\nB:"),
    ],
    ids=["not ended", "ended", "half", "past it", "a stop string past it", "nothing", "a call in another spelling"],
)
def test_an_ending_in_plain_text_is_told_by_the_sampled_text(said: str, calls: bool, expected: str) -> None:
    """ChatML on a vocabulary without its tokens: nothing but the text says whether the end was sampled."""
    continued, closed = "#end\nU:u\nB:", "#end\n"
    ending = find_ending(continued, closed, controls, ENDS, OPENINGS, lambda: said, calls)
    assert ending is not None
    assert ending.count == 0
    assert continued[ending.at :] == expected


def test_a_generation_prompt_that_is_always_written_is_no_part_of_the_ending() -> None:
    assert appended("<section><end><bot><user>u<bot>", "<section><end><bot><call>", "hi<section><end>") == "<bot><user>u<bot>"


def test_blanks_before_the_end_token_do_not_count() -> None:
    assert appended("y\n<end>\n<user>u", "y<end>\n\n", "hi<end>") == "\n<user>u"
