"""`<think>` tags: where they are tags, what is framing, and what a cut leaves."""

from __future__ import annotations

from typing import Any

import pytest


def test_reasoning_as_templates_write_it(parse: Any) -> None:
    parsed = parse("<think>\nX\n</think>\n\nY")
    assert (parsed.reasoning, parsed.text) == ("X", "Y")


def test_reasoning_with_the_opener_in_the_prompt(parse: Any) -> None:
    parsed = parse("X\n</think>\n\nY", reasoning_open=True)
    assert (parsed.reasoning, parsed.text) == ("X", "Y")


def test_reasoning_without_any_newline(parse: Any) -> None:
    parsed = parse("<think>X</think>Y")
    assert (parsed.reasoning, parsed.text) == ("X", "Y")


@pytest.mark.parametrize("output", ["<think></think>Y", "<think>\n</think>\nY", "<think>\n\n</think>\n\nY"])
def test_empty_reasoning_gives_no_reasoning_event(parse: Any, output: str) -> None:
    parsed = parse(output)
    assert (parsed.reasoning, parsed.text) == ("", "Y")
    assert len(parsed.events) == 1


def test_all_whitespace_beyond_framing_is_kept(parse: Any) -> None:
    parsed = parse("<think>\n\n  X \n\n</think>\n\n\n  Y \n\n")
    assert (parsed.reasoning, parsed.text) == ("\n  X \n", "\n  Y \n\n")


def test_newline_after_an_opener_in_the_prompt_is_reasoning(parse: Any) -> None:
    assert parse("\nX</think>Y", reasoning_open=True).reasoning == "\nX"


@pytest.mark.parametrize("pieces", [("<think>\nstill think",), ("<think>\nstill ", "think")])
def test_reasoning_cut_by_length_stays_reasoning(parse: Any, pieces: tuple[str, ...]) -> None:
    parsed = parse(*pieces)
    assert (parsed.reasoning, parsed.text) == ("still think", "")


def test_reasoning_cut_inside_its_closer_keeps_every_character(parse: Any) -> None:
    assert parse("a\n</thi", reasoning_open=True).reasoning == "a\n</thi"


@pytest.mark.parametrize("thought", ["a\n", "a\n</thi"])
def test_reasoning_cut_where_a_closer_could_start_is_reasoning(parse: Any, thought: str) -> None:
    assert parse("<think>\n" + thought).reasoning == thought


def test_framing_is_the_same_a_character_at_a_time(parse: Any) -> None:
    assert parse(*"<think>\nX\n</think>\n\nY").events == parse("<think>X</think>Y").events
    assert parse(*"<think>X</think>Y\n\nZ").text == "Y\n\nZ"


def test_output_cut_inside_the_opener_is_text(parse: Any) -> None:
    assert parse(" \n<thi").text == " \n<thi"


def test_opener_after_blanks_is_a_tag_and_the_blanks_are_text(parse: Any) -> None:
    parsed = parse(" \n\n<think>X</think>Y")
    assert (parsed.reasoning, parsed.text) == ("X", " \nY")


def test_opener_repeated_after_the_prompts_own_is_framing(parse: Any) -> None:
    parsed = parse("<think>\nX\n</think>\n\nY", reasoning_open=True)
    assert (parsed.reasoning, parsed.text) == ("X", "Y")


@pytest.mark.parametrize("output", ["Hi <think>X</think>", "no opener </think> here", "<thinking>X</thinking>", "<Think>X</Think>"])
def test_tags_in_other_places_are_text(parse: Any, output: str) -> None:
    parsed = parse(output)
    assert (parsed.reasoning, parsed.text) == ("", output)


def test_second_reasoning_block_is_text(parse: Any) -> None:
    assert parse("<think>X</think>Y<think>Z</think>").text == "Y<think>Z</think>"


def test_opener_inside_reasoning_is_reasoning(parse: Any) -> None:
    assert parse("<think>a <think> b</think>").reasoning == "a <think> b"


def test_call_inside_reasoning_is_reasoning(parse: Any) -> None:
    thought = '<tool_call>{"name": "bash"}</tool_call>'
    parsed = parse(f"<think>{thought}</think>ok")
    assert (parsed.reasoning, parsed.text, parsed.records) == (thought, "ok", [])


def test_call_right_after_reasoning(parse: Any) -> None:
    parsed = parse('<think>\nX\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>')
    assert (parsed.reasoning, parsed.text, parsed.calls) == ("X", "", [("bash", "{}")])


def test_reasoning_tags_are_text_when_not_read(parse: Any) -> None:
    output = "<think>X</think>Y"
    assert parse(output, reasoning=False).text == output
    assert parse("X</think>Y", reasoning=False, reasoning_open=True).text == "X</think>Y"


def test_reasoning_is_read_without_tools(parse: Any) -> None:
    parsed = parse("<think>\nX\n</think>\n\nY\n", tools=())
    assert (parsed.reasoning, parsed.text) == ("X", "Y\n")
