"""Text and reasoning leave at once, and the work is linear in the text however it is cut."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import turnloom.parse
from tests.parse.spelled import SPELLED
from turnloom.parse.contract import CallEvent, ParseEvent, Parser, ReasoningDelta, TextDelta
from turnloom.parse.formats import parser_factory
from turnloom.types import CallStatus, Tool

TOOLS = [Tool("bash", "", '{"properties": {"text": {"type": "string"}}}')]
PACKAGE = str(Path(turnloom.parse.__file__).parent)


def make(form: str = "hermes", *, reasoning_open: bool = False, tools: list[Tool] = TOOLS) -> Parser:
    return parser_factory(form, "<think>")(tools, reasoning_open)


def written(events: list[ParseEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta | ReasoningDelta))


@pytest.mark.parametrize(
    ("fed", "out"),
    [
        ("Hello", "Hello"),
        ("Hello\n", "Hello"),
        ("Hello\n\n", "Hello\n"),
        ("Hello <", "Hello "),
        ("Hello\n<tool_", "Hello"),
        ("Hello <tool_x", "Hello <tool_x"),
        ("a < b", "a < b"),
        ("a <<", "a <"),
        (" \n", " "),
        (" <thin", " "),
        (" <thing", " <thing"),
        ("Hello <tool_call>", "Hello "),
        ("Hello <tool_call>prose", "Hello <tool_call>prose"),
        ('<tool_call>{"name": bad', '<tool_call>{"name": bad'),
        ("<tool_call><function=bash>stray", "<tool_call><function=bash>stray"),
        ("<tool_call>prose </tool", "<tool_call>prose "),
    ],
)
def test_only_a_possible_tag_and_its_newline_are_held_back(fed: str, out: str) -> None:
    for pieces in ([fed], list(fed)):
        parser = make()
        assert written([event for piece in pieces for event in parser.feed(piece)]) == out


@pytest.mark.parametrize(
    ("fed", "out"), [("X", "X"), ("X\n", "X"), ("X\n</thin", "X"), ("X <", "X "), ("X <b", "X <b"), ("\n", ""), ("\n\n", "\n")]
)
def test_reasoning_leaves_as_it_comes(fed: str, out: str) -> None:
    parser = make(reasoning_open=True)
    assert written([event for piece in fed for event in parser.feed(piece)]) == out


def test_nothing_is_held_back_when_there_is_nothing_to_find() -> None:
    parser = make("none", tools=[])
    assert parser.feed("<tool_call>\n<think>\n") == [TextDelta("<tool_call>\n<think>\n")]


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"name": "bash", "arguments": {}}</tool_call>',
        "<tool_call><function=bash><parameter=text>x</parameter></function></tool_call>",
        "<tool_call><function=bash></function></tool_call>",
    ],
)
def test_call_comes_out_with_its_last_character(call: str) -> None:
    parser = make()
    assert [event for piece in call[:-1] for event in parser.feed(piece)] == []
    [event] = parser.feed(call[-1])
    assert isinstance(event, CallEvent)
    assert parser.records == [event.record]


def test_record_of_a_broken_call_comes_with_its_closing_tag() -> None:
    parser = make()
    parser.feed("<tool_call>{bad")
    assert parser.records == []
    parser.feed("}</tool_call>")
    assert [record.status for record in parser.records] == [CallStatus.INVALID_JSON]


JSON_OPEN = '<tool_call>{"name": "bash", "arguments": {"text": "'
XML_OPEN = "<tool_call><function=bash><parameter=text>"
GOOD = '<tool_call>{"name": "bash"}</tool_call>'
SHAPES: dict[str, Callable[[int], str]] = {
    "plain text": lambda n: "x" * n,
    "newlines": lambda n: "\n" * n,
    "blanks before anything": lambda n: " " * n + "x",
    "less-than signs": lambda n: "<" * n,
    "tag prefixes": lambda n: "<tool_cal" * (n // 9),
    "reasoning": lambda n: "<think>" + "x\n<" * (n // 3),
    "a json string": lambda n: JSON_OPEN + "x" * n + '"}}</tool_call>',
    "escapes in a json string": lambda n: JSON_OPEN + '\\"' * (n // 2) + '"}}</tool_call>',
    "an open json string": lambda n: JSON_OPEN + "</tool_call><tool_call>{" * (n // 24),
    "json numbers": lambda n: '<tool_call>{"name": "bash", "arguments": {"a": [' + "1," * (n // 2) + "1]}}</tool_call>",
    "json nesting": lambda n: '<tool_call>{"name": "bash", "arguments": {"a": ' + "[" * (n // 2) + "]" * (n // 2) + "}}</tool_call>",
    "quoted brackets in arguments as a string": lambda n: JSON_OPEN.replace('{"text": "', '"') + '\\"[' * (n // 3) + '"}</tool_call>',
    "blanks after the object": lambda n: '<tool_call>{"name": "bash"}' + " " * n + "</tool_call>",
    "blanks after the opening tag": lambda n: "<tool_call>" + "\n" * n + '{"name": "bash"}</tool_call>',
    "an xml value": lambda n: XML_OPEN + "x" * n + "</parameter></function></tool_call>",
    "blanks in an xml value": lambda n: XML_OPEN + "</parameter>" + " " * n + "</function></tool_call>",
    "value ends in an xml value": lambda n: XML_OPEN + "</parameter>" * (n // 12),
    "function ends in an xml value": lambda n: XML_OPEN + "</function></tool_call>" * (n // 23),
    "headers in an xml value": lambda n: XML_OPEN + "<function=a>" * (n // 12),
    "nested functions in an xml value": lambda n: XML_OPEN + "<function=a><parameter=b>" * (n // 25),
    "a name without an end": lambda n: "<tool_call><function=" + "x" * n,
    "keys without an end in an xml value": lambda n: XML_OPEN + "</parameter><parameter=" * (n // 23),
    "a key without an end in an xml value": lambda n: XML_OPEN + "</parameter><parameter=" + "x" * n,
    "xml parameters": lambda n: "<tool_call><function=bash>" + "<parameter=a>x</parameter>" * (n // 26) + "</function></tool_call>",
    "opening tags": lambda n: "<tool_call>" * (n // 11),
    "closing tags": lambda n: "</tool_call>" * (n // 12),
    "unclosed xml calls": lambda n: "<tool_call><function=bash><parameter=a>x</tool_call>" * (n // 51),
    "reopened xml calls": lambda n: "<tool_call><function=bash><parameter=a>x</parameter></function>" * (n // 62),
    "headers only": lambda n: "<tool_call><function=bash>" * (n // 26),
    "broken json calls": lambda n: "<tool_call>{bad}</tool_call>" * (n // 28),
    "one broken call": lambda n: "<tool_call>" + "prose " * (n // 6),
    "good calls": lambda n: GOOD * (n // len(GOOD)),
}


def handed_over(output: str, step: int, form: str = "hermes") -> int:
    """The characters in all string arguments of all calls within the package: what its functions were given to look at."""
    seen = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal seen
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            seen += 1 + sum(len(value) for name in names if isinstance(value := frame.f_locals[name], str))

    parser = make(form)
    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        for at in range(0, len(output), step):
            parser.feed(output[at : at + step])
        parser.finish()
    finally:
        sys.setprofile(previous)
    return seen


SIZE = {1: 400, 10**9: 1500}


@pytest.mark.parametrize("step", SIZE, ids=["a character at a time", "all at once"])
@pytest.mark.parametrize("shape", SHAPES)
def test_work_is_linear_in_the_text(shape: str, step: int) -> None:
    """All at once the text is longer than the pieces that the reader cuts it into; by the character every length shows it."""
    small, large = (SHAPES[shape](n * SIZE[step]) for n in (1, 4))
    assert handed_over(large, step) <= 1.5 * (len(large) / len(small)) * handed_over(small, step)


def repeated(piece: str, n: int) -> str:
    return piece * (n // len(piece))


SPELLED_SHAPES: dict[str, Callable[[str, str, int], str]] = {
    "a value": lambda head, tail, n: head + "x" * n + tail,
    "less-than signs in a value": lambda head, tail, n: head + "<" * n + tail,
    "ends in a value": lambda head, tail, n: head + repeated(tail, n),
    "openings in a value": lambda head, tail, n: head + repeated(head, n),
    "openings": lambda head, tail, n: repeated(head, n),
    "good calls": lambda head, tail, n: repeated(head + tail, n),
    "a name without an end": lambda head, tail, n: head[: head.index("bash")] + "x" * n,
    "blanks after the first tag": lambda head, tail, n: head[: head.index(">") + 1] + "\n" * n,
    "blanks after a call": lambda head, tail, n: head + tail + "\n" * n + "<",
}


@pytest.mark.parametrize("step", SIZE, ids=["a character at a time", "all at once"])
@pytest.mark.parametrize("shape", SPELLED_SHAPES)
@pytest.mark.parametrize("form", ["glm", "deepseek_v3", "deepseek_v31", "kimi_k2", "minimax_m2", "deepseek_dsml"])
def test_work_is_linear_in_the_text_of_other_formats(form: str, shape: str, step: int) -> None:
    head, tail = SPELLED[form]([("bash", {"text": "VALUE"})]).split("VALUE")
    small, large = (SPELLED_SHAPES[shape](head, tail, n) for n in (7 * SIZE[step] // 5, 14 * SIZE[step] // 5))
    assert handed_over(large, step, form) <= 1.5 * (len(large) / len(small)) * handed_over(small, step, form)


@pytest.mark.parametrize("form", SPELLED)
def test_call_of_any_format_comes_out_once_its_end_is_certain(form: str) -> None:
    """With its last character; an invoke, which could still be part of a value, with the tag after it."""
    output = SPELLED[form]([("bash", {"text": "x"})])
    parser = make(form)
    came = [len([event for event in parser.feed(char) if isinstance(event, CallEvent)]) for char in output]
    [record] = parser.records
    end = len(output) if form in ("minimax_m2", "deepseek_dsml") else record.end
    assert (came.index(1) + 1, sum(came)) == (end, 1)


@pytest.mark.parametrize("shape", ["plain text", "a json string", "an xml value"])
def test_fifty_thousand_characters_one_at_a_time(shape: str) -> None:
    parser = make()
    output = SHAPES[shape](50_000)
    events = [event for char in output for event in parser.feed(char)] + parser.finish()
    calls = [event for event in events if isinstance(event, CallEvent)]
    expected = (output, 0) if shape == "plain text" else ("", 1)
    assert (written(events), len(calls)) == expected
