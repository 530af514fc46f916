"""Calls with a JSON body: the traps that engines' parsers fall into, each by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnloom.parse.strict_json import MAX_DEPTH
from turnloom.types import CallStatus


def call(arguments: str, name: str = "bash") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_call_as_templates_write_it(parse: Any) -> None:
    parsed = parse("Reading.\n" + call('{"path": "README.md"}', "read_file"))
    assert (parsed.text, parsed.calls) == ("Reading.", [("read_file", '{"path": "README.md"}')])


def test_call_with_no_newline_anywhere(parse: Any) -> None:
    assert parse('<tool_call>{"name":"bash","arguments":{"a":1}}</tool_call>').calls == [("bash", '{"a":1}')]


def test_closing_tag_inside_a_json_string(parse: Any) -> None:
    arguments = '{"text": "a </tool_call> b <tool_call> c"}'
    assert parse(call(arguments)).calls == [("bash", arguments)]


def test_braces_inside_arguments(parse: Any) -> None:
    arguments = r'{"command": "mkdir a/{b,c} && echo \"}]{\""}'
    assert parse(call(arguments)).calls == [("bash", arguments)]


def test_arguments_keep_the_models_spelling(parse: Any) -> None:
    arguments = '{ "b":1.10, "a" : 1E300,"a":[ ], "n": 123456789012345678901234567890,\n\t"u":"\\u00e9\\/é" }'
    assert parse(call(arguments)).calls == [("bash", arguments)]


@pytest.mark.parametrize("number", ["1" * 300, "-" + "9" * 308, "-0", "1E-400", "0." + "1" * 5000])
def test_number_of_any_length_that_a_double_holds(parse: Any, number: str) -> None:
    arguments = f'{{"n": {number}}}'
    assert parse(call(arguments)).calls == [("bash", arguments)]


def test_string_of_arguments_is_not_repaired(parse: Any) -> None:
    """A backslash before half a surrogate pair is no escape; it does not become one by spelling the half."""
    assert parse(call('"{\\"a\\": \\"\\\\\\ud83d\\"}"')).statuses == [CallStatus.MALFORMED]


def test_arguments_before_the_name(parse: Any) -> None:
    assert parse('<tool_call>{"arguments": {"a": 1}, "name": "bash"}</tool_call>').calls == [("bash", '{"a": 1}')]


def test_parameters_is_a_synonym_of_arguments(parse: Any) -> None:
    assert parse('<tool_call>{"name": "bash", "parameters": {"a": 1}}</tool_call>').calls == [("bash", '{"a": 1}')]


def test_other_members_are_ignored(parse: Any) -> None:
    assert parse('<tool_call>{"id": 7, "name": "bash", "arguments": {}}</tool_call>').calls == [("bash", "{}")]


def test_arguments_as_a_string_that_holds_an_object(parse: Any) -> None:
    inner = '{"text": "say \\"hi\\" </tool_call>"}'
    assert parse(call(json.dumps(inner))).calls == [("bash", inner)]


@pytest.mark.parametrize("arguments", ['"not json"', '"[1]"', '""', "[1]", "null", "3", r'"{\"a\": NaN}"'])
def test_arguments_that_are_no_object_are_malformed_text(parse: Any, arguments: str) -> None:
    parsed = parse(call(arguments))
    assert (parsed.statuses, parsed.text, parsed.calls) == ([CallStatus.MALFORMED], call(arguments), [])
    assert parsed.records[0].name == "bash"


@pytest.mark.parametrize("body", ['{"name": "bash"}', '{"name": "bash", "arguments": {}}', '{"name": "bash", "arguments": "{}"}'])
def test_call_without_arguments(parse: Any, body: str) -> None:
    assert parse(*f"<tool_call>{body}</tool_call>").calls == [("bash", "{}")]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "bash", "name": "read_file", "arguments": {}}',
        '{"name": "bash", "arguments": {}, "parameters": {"a": 1}}',
        '{"name": "bash", "arguments": {}, "arguments": {"a": 1}}',
    ],
)
def test_member_given_twice_is_malformed(parse: Any, body: str) -> None:
    assert parse(f"<tool_call>{body}</tool_call>").statuses == [CallStatus.MALFORMED]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "bash", "arguments": {"a": NaN}}',
        '{"name": "bash", "arguments": {"a": -Infinity}}',
        '{"name": "bash", "arguments": {"a": 1e999}}',
        '{"name": "bash", "arguments": {"a": [-1e999]}}',
        '{"name": "bash", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "bash", "arguments": {"a": 1,}}',
        '{"name": "bash", "arguments": {"a": 01}}',
        '{"name": "bash", "arguments": {"a": "line\nbreak"}}',
        '{"name": "bash", "arguments": {"a": "\\x"}}',
        '{"name": "bash", "arguments": {"a": 1}',
        '{"name": "bash", "arguments": {"a": 1]}',
        '{"name": "bash", "arguments": {}} trailing',
        '{"name": "bash", "arguments": {}}}',
        '{"name": "bash" "arguments": {}}',
        "{'name': 'bash', 'arguments': {}}",
        '{name: "bash"}',
        "{1: 2}",
        "{true}",
        "[{}]",
        "not json",
        "",
        "bash<arg_key>a</arg_key><arg_value>1</arg_value>",
    ],
)
def test_body_that_is_not_strict_json_is_text_as_written(parse: Any, body: str) -> None:
    output = f"a\n<tool_call>\n{body}\n</tool_call>\nb"
    parsed = parse(output)
    assert (parsed.statuses, parsed.text, parsed.calls) == ([CallStatus.INVALID_JSON], output, [])
    assert parsed.records[0].raw == f"<tool_call>\n{body}\n</tool_call>"


def test_nesting_beyond_the_limit_is_invalid(parse: Any) -> None:
    def nested(depth: int) -> str:
        return call('{"a": ' + "[" * depth + "]" * depth + "}")

    assert parse(nested(MAX_DEPTH - 2)).statuses == [CallStatus.OK]
    assert parse(nested(MAX_DEPTH - 1)).statuses == [CallStatus.INVALID_JSON]
    assert parse(nested(100_000)).statuses == [CallStatus.INVALID_JSON]


@pytest.mark.parametrize("body", ['{"arguments": {}}', '{"name": 5, "arguments": {}}', '{"name": "", "arguments": {}}', "{}"])
def test_call_without_a_name(parse: Any, body: str) -> None:
    output = f"<tool_call>{body}</tool_call>"
    parsed = parse(output)
    assert (parsed.statuses, parsed.text, parsed.records[0].name) == ([CallStatus.MISSING_NAME], output, "")


def test_unknown_tool_is_text_and_the_record_has_its_name(parse: Any) -> None:
    output = call("{}", "rm_rf")
    parsed = parse(output)
    assert (parsed.statuses, parsed.text, parsed.records[0].name) == ([CallStatus.UNKNOWN_TOOL], output, "rm_rf")


@pytest.mark.parametrize("name", ["bash<|channel|>", " bash", "Bash", "functions.bash"])
def test_name_that_is_not_exactly_a_tools_is_unknown(parse: Any, name: str) -> None:
    parsed = parse(call("{}", name))
    assert (parsed.statuses, parsed.records[0].name) == ([CallStatus.UNKNOWN_TOOL], name)


def test_surrogate_pair_split_across_pieces(parse: Any) -> None:
    arguments = r'{"text": "\ud83d\ude00"}'
    for at in range(len(call(arguments))):
        assert parse(call(arguments)[:at], call(arguments)[at:]).calls == [("bash", arguments)]


def test_lone_surrogate_stays_as_it_was_spelled(parse: Any) -> None:
    assert parse(call(r'{"text": "\ud83d"}')).calls == [("bash", r'{"text": "\ud83d"}')]


def test_lone_surrogate_in_string_arguments_is_spelled_as_its_escape(parse: Any) -> None:
    [(_, arguments)] = parse(call(r'"{\"text\": \"\ud83d\"}"')).calls
    assert arguments == r'{"text": "\ud83d"}'


def test_lone_surrogate_in_a_name_can_be_recorded(parse: Any) -> None:
    [record] = parse(call("{}", r"\ud83d")).records
    assert (record.status, record.name) == (CallStatus.UNKNOWN_TOOL, r"\ud83d")


@pytest.mark.parametrize(
    "output",
    [
        "<tool_call>",
        "<tool_call>\n ",
        "<tool_call>\n<func",
        '<tool_call>{"name": "bash", "argu',
        '<tool_call>{"name": "bash", "arguments": {"a": "x\\',
        '<tool_call>{"name": "bash", "arguments": {}}',
        '<tool_call>{"name": "bash", "arguments": {}}\n</tool_',
        "<tool_call>prose that ends",
        "<tool_call>prose that ends</tool_",
    ],
)
def test_call_cut_by_length_is_unclosed_text(parse: Any, output: str) -> None:
    for pieces in ((output,), tuple(output)):
        parsed = parse("a\n", *pieces)
        assert (parsed.statuses, parsed.text) == ([CallStatus.UNCLOSED], "a\n" + output)
        assert (parsed.records[0].start, parsed.records[0].end) == (2, 2 + len(output))


def test_several_calls_and_the_text_around_them(parse: Any) -> None:
    parsed = parse("a\n" + call('{"n": 1}') + "\n\n b \n\n" + call('{"n": 2}') + call('{"n": 3}') + "\nc\n")
    assert parsed.calls == [("bash", '{"n": 1}'), ("bash", '{"n": 2}'), ("bash", '{"n": 3}')]
    assert parsed.text == "a" + "\n b \n" + "c\n"


@pytest.mark.parametrize(("between", "kept"), [("", ""), ("\n", ""), ("\n\n", ""), ("\n\n\n", "\n"), (" ", " ")])
def test_one_newline_on_each_side_of_a_call_is_framing(parse: Any, between: str, kept: str) -> None:
    parsed = parse(call("{}") + between + call("{}"))
    assert (parsed.text, len(parsed.calls)) == (kept, 2)


def test_blank_text_after_the_last_call_is_not_lost(parse: Any) -> None:
    assert parse(call("{}") + "\n \n").text == " \n"


def test_span_is_the_calls_own_characters(parse: Any) -> None:
    output = "文a\n" + call("{}") + "\n"
    [record] = parse(output).records
    assert output[record.start : record.end] == record.raw == call("{}")


def test_failed_call_leaves_the_next_one_whole(parse: Any) -> None:
    bad = '<tool_call>\n{"name": "bash", "arguments": {"a": 1}\n</tool_call>'
    parsed = parse(bad + "\n" + call("{}") + "\n" + bad)
    assert parsed.statuses == [CallStatus.INVALID_JSON, CallStatus.OK, CallStatus.INVALID_JSON]
    assert parsed.text == bad + bad


def test_opening_tag_named_in_prose_leaves_the_next_call_whole(parse: Any) -> None:
    parsed = parse("Write `<tool_call>` first. " + call("{}"))
    assert (parsed.statuses, parsed.text) == ([CallStatus.UNCLOSED, CallStatus.OK], "Write `<tool_call>` first. ")


def test_call_without_its_closing_tag_leaves_the_next_one_whole(parse: Any) -> None:
    parsed = parse('<tool_call>{"name": "bash", "arguments": {}}\n' + call('{"n": 2}'))
    assert (parsed.statuses, parsed.calls) == ([CallStatus.UNCLOSED, CallStatus.OK], [("bash", '{"n": 2}')])


def test_call_quoted_in_a_broken_string_does_not_run(parse: Any) -> None:
    output = '<tool_call>{"name": "write_file", "arguments": {"text": "a\n<tool_call>{\\"name\\"}' + call("{}") + '"}}'
    assert parse(output).calls == []


def test_tags_pass_through_when_no_tool_is_declared(parse: Any) -> None:
    output = "a\n" + call("{}") + "\n<tool_call>"
    parsed = parse(output, tools=())
    assert (parsed.text, parsed.records) == (output, [])


def test_json_body_is_no_call_where_the_template_teaches_xml(parse: Any) -> None:
    parsed = parse(call("{}"), form="qwen3_coder")
    assert (parsed.statuses, parsed.text) == ([CallStatus.MALFORMED], call("{}"))
