"""The id that Kimi writes names the tool: the template's spelling, and others that models write."""

from __future__ import annotations

from typing import Any

import pytest

from turnloom.parse.contract import CallEvent
from turnloom.types import CallStatus, Tool

TOOLS = [Tool(name, "", "{}") for name in ("bash", "bash_output", "mcp__files__read-all", "functions.odd", "odd", "ns:tool")]


def call(written: str, arguments: str = '{"a": 1}') -> str:
    return f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("functions.bash:0", "bash"),
        ("functions.bash:12", "bash"),
        ("functions.bash_output:0", "bash_output"),
        ("functions.mcp__files__read-all:3", "mcp__files__read-all"),
        ("functions.functions.odd:0", "functions.odd"),
        ("functions.odd", "functions.odd"),
        ("functions.ns:tool:1", "ns:tool"),
        ("ns:tool", "ns:tool"),
        ("functions.bash", "bash"),
        ("bash:0", "bash"),
        ("bash", "bash"),
        ("call_bash_3", "bash"),
        ("call_bash_output_3", "bash_output"),
        ("bash_0", "bash"),
        ("bash:abc", "bash"),
        ("tool.bash:1", "bash"),
        ("chatcmpl-tool-bash", "bash"),
    ],
)
def test_id_of_any_spelling_that_names_a_tool_is_a_call_and_is_kept(parse: Any, written: str, name: str) -> None:
    parsed = parse(call(written), tools=TOOLS, form="kimi_k2")
    assert [(event.name, event.written) for event in parsed.events if isinstance(event, CallEvent)] == [(name, written)]


@pytest.mark.parametrize(
    ("written", "status", "name"),
    [
        ("functions.rm:0", CallStatus.UNKNOWN_TOOL, "rm"),
        ("rm:0", CallStatus.UNKNOWN_TOOL, "rm"),
        ("functions.bashful:0", CallStatus.UNKNOWN_TOOL, "bashful"),
        ("call_1", CallStatus.MISSING_NAME, ""),
        ("bashful", CallStatus.MISSING_NAME, ""),
        ("toolu_01AbC", CallStatus.MISSING_NAME, ""),
        ("bash_or_bash_output", CallStatus.MISSING_NAME, ""),
        ("functions.:0", CallStatus.MISSING_NAME, ""),
        ("", CallStatus.MISSING_NAME, ""),
    ],
)
def test_id_that_names_no_declared_tool_or_several_is_text(parse: Any, written: str, status: CallStatus, name: str) -> None:
    output = f"<|tool_calls_section_begin|>{call(written)}<|tool_calls_section_end|>"
    parsed = parse(output, tools=TOOLS, form="kimi_k2")
    assert (parsed.statuses, parsed.records[0].name.replace(written, name), parsed.text) == ([status], name, output)


def test_blanks_around_an_id_are_not_part_of_it(parse: Any) -> None:
    parsed = parse(call(" functions.bash:0 "), tools=TOOLS, form="kimi_k2")
    assert [event.written for event in parsed.events if isinstance(event, CallEvent)] == ["functions.bash:0"]


def test_id_longer_than_any_name_is_text(parse: Any) -> None:
    output = call("functions." + "x" * 300 + ".bash:0")
    parsed = parse(output, tools=TOOLS, form="kimi_k2")
    assert (parsed.statuses, parsed.text) == ([CallStatus.MALFORMED], output)


def test_call_with_nothing_between_its_last_tags_has_no_arguments(parse: Any) -> None:
    assert parse(call("functions.bash:0", ""), tools=TOOLS, form="kimi_k2").calls == [("bash", "{}")]
    assert parse(call("functions.bash:0", " \n"), tools=TOOLS, form="kimi_k2").calls == [("bash", "{}")]


def test_section_tags_in_the_singular_are_read(parse: Any) -> None:
    output = f"a<|tool_call_section_begin|>{call('functions.bash:0')}<|tool_call_section_end|>b"
    parsed = parse(output, tools=TOOLS, form="kimi_k2")
    assert (parsed.text, len(parsed.calls)) == ("ab", 1)
